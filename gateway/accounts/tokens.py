"""Random tokens of sessions and links. They are kept as SHA-256: nobody can search 2^256 values."""

from __future__ import annotations

import hashlib
import re
import secrets

_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


def new_token() -> str:
    """256 random bits as 43 characters that fit a cookie and a URL."""
    return secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Whether a text has the form of a token."""
    return _TOKEN.fullmatch(text) is not None


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
