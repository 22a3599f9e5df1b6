"""``python -m bench NAME``: one module for each of :data:`BENCHES`."""

from __future__ import annotations

import importlib
import sys

BENCHES = (
    "churn", "console", "cpu", "gateway", "kernels", "latency", "live", "memory", "parity", "punica", "report", "serve",
    "slora", "soak", "start", "throughput",
)  # fmt: skip


def main() -> int:
    """Run the named measurement; its module's ``main`` takes the remaining arguments."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: python -m bench {{{'|'.join(BENCHES)}}} [options]", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{sys.argv[1]}")
    return int(module.main(sys.argv[2:]))


sys.exit(main())
