"""How a process of ours logs: lines for people, or one JSON object a line for machines.

Whatever a record carries in :data:`FIELDS` becomes members of its object: ``logger.info("…", extra={FIELDS: {…}})``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

FIELDS = "fields"
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"

_QUIET = {"alembic": logging.WARNING, "torch": logging.WARNING, "aiohttp.server": logging.CRITICAL}
"""Loggers of libraries that say what nobody needs: torch statistics of its caches at every exit, aiohttp a traceback
for each malformed request."""
_encode = msgspec.json.Encoder(enc_hook=str).encode


def configure_logs(kind: str, context: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Log to standard error from here on. ``kind`` is ``text`` or ``json``; ``context`` gives members of every object,
    such as the id of the request at hand.
    """
    formatter = JsonFormatter(context) if kind == "json" else logging.Formatter(TEXT)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, ``error`` with a traceback, and fields."""

    def __init__(self, context: Callable[[], Mapping[str, Any]] = dict) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._context(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode()
