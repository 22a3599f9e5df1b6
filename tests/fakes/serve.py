"""The real supervisor over the fake engine and the fake gateway; what `stencilpress serve` is, without a model.

``python -m tests.fakes.serve DATA [--host H] [--port P] [--gateways N] [--engines N] [--engine "ARGS"]
[--gateway "ARGS"]``; prints ``ready URL`` once ``/readyz`` answers. ``--engine-command`` replaces the engine;
``--real-gateway`` takes the real gateway, with settings from variables. ``--last-backoff-s`` bounds the wait before a
process is started again.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from pathlib import Path

from stencilpress import children
from stencilpress.supervisor import GATEWAY_COMMAND, ServeError, ServeSettings, run


def main() -> int:
    """Run until a signal comes; 1 if the server could not start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--engine", default="")
    parser.add_argument("--engine-command", default="")
    parser.add_argument("--gateway", default="")
    parser.add_argument("--real-gateway", action="store_true")
    parser.add_argument("--last-backoff-s", type=float, default=children.LAST_BACKOFF_S)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    children.LAST_BACKOFF_S = given.last_backoff_s
    settings = ServeSettings(
        data_dir=given.data,
        host=given.host,
        port=given.port,
        gateways=given.gateways,
        engines=given.engines,
        environment=dict(os.environ),
        engine_command=shlex.split(given.engine_command)
        or [sys.executable, "-m", "tests.fakes.engine", *shlex.split(given.engine)],
        tls="STENCILPRESS_TLS_KEY" in os.environ,
        gateway_command=GATEWAY_COMMAND
        if given.real_gateway
        else [sys.executable, "-m", "tests.fakes.gateway", *shlex.split(given.gateway)],
    )
    try:
        return run(settings, on_ready=lambda url: print(f"ready {url}", flush=True))  # noqa: T201
    except ServeError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
