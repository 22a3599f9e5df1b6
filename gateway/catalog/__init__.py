"""Tenants, keys, adapters, versions and aliases in SQL. SQLAlchemy lives in this package alone.

``session.Database`` is opened once per process; ``tenants``, ``credentials`` and ``adapters`` are functions
over it; what they return is in ``records`` and what they refuse in ``errors`` (both free of SQLAlchemy).
"""
