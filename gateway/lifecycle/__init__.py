"""The life of an adapter's versions: uploads, smoke prompts, differences, leases, upkeep, the cold tier.

Services over the catalog, the blob folder and the engine's client; HTTP is in ``api/``, SQL in ``catalog/``.
"""
