"""The engine process: ``python -m stencilpress.engine``, started by the supervisor.

Exit codes: 0 after SIGTERM; 1 when the device or the policy failed beyond one step; 2 for settings or a model that
cannot be served, with one line on stderr.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stencilpress.engine import lifeline
from stencilpress.engine.logs import configure_logs
from stencilpress.engine.settings import EngineSettings, SettingsError, read_settings
from stencilpress.engine.spec import SpecError, load_spec
from stencilpress.engine.threads import configure_threads

if TYPE_CHECKING:
    from stencilpress.engine.worker import Worker

BAD_SETTINGS = 2
COLLECT_AFTER = 10_000
"""Objects made until the garbage collector looks at the youngest. Steps make many, and nearly all end with them."""
SWITCH_S = 0.0005
"""How long a thread that loads an adapter may keep the interpreter from the loop."""


def main() -> int:
    """Load the model, then accept gateways (a welcome means ready) and serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to end
    try:
        settings = read_settings(EngineSettings, os.environ)
        configure_logs(settings.log_format)
        if settings.lifeline_fd >= 0:
            lifeline.hold(settings.lifeline_fd)
        worker = _load(settings)
    except (SettingsError, SpecError) as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201 the supervisor shows this line to the operator
        return BAD_SETTINGS
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    settle()
    worker.run()
    return 0


def settle() -> None:
    """Let nothing hold up the loop for long: neither the garbage collector nor threads that load adapters."""
    gc.collect()
    gc.freeze()  # torch's modules among others: looking through them again would stop all streams
    gc.set_threshold(COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_S)


def _load(settings: EngineSettings) -> Worker:
    """Everything but serving. Raises :class:`SettingsError` or :class:`SpecError` for what cannot be served here."""
    if settings.engine_fd < 0:
        raise SettingsError("STENCILPRESS_ENGINE_FD is not set: the supervisor passes the listening socket")
    spec = load_spec(Path(settings.model_dir), settings.dtype)
    threads = configure_threads(settings)

    import torch  # after configure_threads, whose variables it reads

    from stencilpress.engine.compose import compose
    from stencilpress.engine.model.weights import WeightsError

    torch.set_num_threads(threads)
    try:
        return compose(settings, spec, socket.socket(fileno=settings.engine_fd))
    except (WeightsError, MemoryError) as error:
        raise SettingsError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
