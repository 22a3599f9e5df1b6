"""The admin API, ``/admin/api/v1``: one operation per verb, from which come the routes and the OpenAPI document.

``operation.py`` says what an operation is, ``dispatch.py`` runs one, ``openapi.py`` describes them, ``views.py`` has
the bodies; every other module has the operations of one kind of thing, ``router.py`` lists them.
"""
