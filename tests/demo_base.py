"""The demo base for tests, fetched once into ``.test-data`` in the checkout (or ``STENCILPRESS_TEST_DATA``) and kept.

``python -m tests.demo_base`` fetches it beforehand, so that no test's time limit has to include a download.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from stencilpress.pull import pull

NAME = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[1]


@functools.cache
def demo_base_folder() -> Path:
    """The folder of the converted base; the first call ever downloads it."""
    kept = Path(os.environ.get("STENCILPRESS_TEST_DATA", ROOT / ".test-data"))
    return pull(NAME, kept / "v1" / "models")


if __name__ == "__main__":
    demo_base_folder()
