"""Measurements. ``python -m bench <name>`` runs one; results are appended to bench/results/."""
