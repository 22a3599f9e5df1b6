"""Rotary embedding and the write of keys and values."""
