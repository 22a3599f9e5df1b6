"""Alerts: what is judged (``rules.py``), how it comes and goes (``incidents.py``, ``evaluate.py``), who is told
(``notification.py``, ``courier.py``, ``addresses.py``), and the jobs that do it (``watch.py``).

All but the last two are pure; SQL is in ``catalog/alerts.py`` and ``catalog/alert_readings.py``.
"""
