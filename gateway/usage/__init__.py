"""Usage: one row per admitted request, safe from a killed gateway, and roll-ups of the rows."""
