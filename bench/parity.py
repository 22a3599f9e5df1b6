"""Greedy tokens of the base and every shipped adapter against transformers + PEFT, computed live, in float32.

20 prompts for each, up to 64 tokens, all requests in flight at once in the engine of a running server; the
reference runs each pair alone. A difference counts as a tie only where the two best logits lie within 1e-3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

from bench.cpu import BASE
from bench.server import serving
from tests.parity.engine_answers import differences, engine_answers
from tests.parity.record import BASE as NO_ADAPTER
from tests.parity.record import MAX_NEW_TOKENS, prompt_token_ids, prompts, reference, shipped_adapters


def digests(data: Path) -> dict[str, str]:
    """Digest of the promoted version of each of the demo tenant's adapters."""
    command = [sys.executable, "-m", "stencilpress.cli", "adapter", "list", "--tenant", "demo", "--json"]
    listed = subprocess.run([*command, "--data", str(data)], capture_output=True, text=True, check=True)
    promoted = [row for row in json.loads(listed.stdout) if "prod" in row["aliases"]]
    return {row["version"].partition("@")[0]: row["digest"] for row in promoted}


def main(arguments: list[str]) -> int:
    """Print every difference; exit code 1 if one is not a tie."""
    parser = argparse.ArgumentParser(prog="python -m bench parity", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path.home() / ".local/share/stencilpress")
    options = parser.parse_args(arguments)
    model_dir, adapters = options.data / "v1" / "models" / BASE, shipped_adapters()
    with serving(options.data, dtype="float32"):
        enrolled = digests(options.data)
        wanted = {NO_ADAPTER: "", **{name: enrolled[name] for name in adapters}}
        socket_path = options.data / "v1" / "run" / "engine.sock"
        inputs = prompt_token_ids(model_dir, prompts())
        got = asyncio.run(engine_answers(socket_path, wanted, inputs, MAX_NEW_TOKENS))
    print(f"engine: {sum(len(a) for rows in got.values() for a in rows)} tokens; computing the reference", flush=True)
    expected = reference(model_dir, adapters, prompts(), MAX_NEW_TOKENS)
    found = differences(expected, got)
    for difference in found:
        print(difference)
    wrong = sum(not d.is_tie for d in found)
    total = sum(len(rows) for rows in expected.values())
    print(f"{total} answers: {total - len(found)} equal, {len(found) - wrong} part at a tie, {wrong} wrong")
    return 1 if wrong else 0
