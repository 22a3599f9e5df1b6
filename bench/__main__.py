"""``python -m bench NAME``: one module for each of :data:`BENCHES`."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

BENCHES = (
    "churn", "console", "cpu", "gateway", "kernels", "latency", "live", "memory", "parity", "punica", "report", "serve",
    "slora", "soak", "start", "throughput",
)  # fmt: skip


def about(name: str) -> str:
    """The first line of a measurement's module; those are not imported, as each needs packages of its own."""
    text = ast.get_docstring(ast.parse((Path(__file__).parent / f"{name}.py").read_text())) or ""
    return text.splitlines()[0].removeprefix(f"``python -m bench {name}``: ")


def main(arguments: list[str]) -> int:
    """Run the named measurement; its module's ``main`` takes the remaining arguments."""
    if arguments[:1] in (["-h"], ["--help"]):
        print("usage: python -m bench NAME [options]; -h after a name shows its options\n")
        print("\n".join(f"  {name:12} {about(name)}" for name in BENCHES))
        return 0
    if not arguments or arguments[0] not in BENCHES:
        print(f"usage: python -m bench {{{'|'.join(BENCHES)}}} [options]", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"bench.{arguments[0]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("bench", "stencilpress", "tests"):
            raise
        print(f"python -m bench {arguments[0]} needs {error.name}, which `pip install -e '.[test]'` brings",
              file=sys.stderr)  # fmt: skip
        return 1
    return int(module.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
