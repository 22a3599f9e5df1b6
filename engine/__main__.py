"""The engine process: ``python -m stencilpress.engine``, started by the supervisor.

Exit codes: 0 after SIGTERM; 2 for settings or a model that cannot be served, with one line on stderr.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path

from stencilpress.engine import lifeline
from stencilpress.engine.settings import EngineSettings, SettingsError, read_settings
from stencilpress.engine.spec import ModelSpec, SpecError, load_spec
from stencilpress.engine.threads import configure_threads

BAD_SETTINGS = 2


def main() -> int:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    try:
        settings = read_settings(EngineSettings, os.environ)
        if settings.lifeline_fd >= 0:
            lifeline.hold(settings.lifeline_fd)
        listener = socket.socket(fileno=settings.engine_fd)
        configure_threads(settings)
        spec = load_spec(Path(settings.model_dir), settings.dtype)
        return _serve(settings, spec, listener)
    except (SettingsError, SpecError) as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201 the supervisor shows this line to the operator
        return BAD_SETTINGS


def _serve(settings: EngineSettings, spec: ModelSpec, listener: socket.socket) -> int:
    """Load the model, then accept gateways: a welcome means ready."""
    import torch  # after configure_threads, whose variables it reads

    from stencilpress.engine.compose import compose

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    worker = compose(settings, spec, listener)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to end
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
