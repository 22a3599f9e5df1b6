"""Alembic's environment. Run through gateway/catalog/schema.py, which configures it; there is no alembic.ini."""
