"""Regular expressions that a tenant wrote, against texts, in a process of its own: one may take for ever.

``python -m stencilpress.gateway.lifecycle.match_worker`` reads a list of pairs ``[pattern, text]`` and writes a list:
true or false, or null for a pattern that is none.
"""

from __future__ import annotations

import re
import sys

import msgspec

from stencilpress.gateway.worker_process import confine, read_request

MEMORY_BYTES = 512 << 20
CPU_S = 5


def main() -> None:
    pairs = msgspec.json.decode(read_request(), type=list[tuple[str, str]])
    confine(MEMORY_BYTES, CPU_S)
    sys.stdout.buffer.write(msgspec.json.encode([_matches(pattern, text) for pattern, text in pairs]))


def _matches(pattern: str, text: str) -> bool | None:
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):
        return None


if __name__ == "__main__":
    main()
