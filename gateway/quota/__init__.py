"""Quotas: what a tenant may use per minute, at once, per day and per month, reserved before any work begins."""
