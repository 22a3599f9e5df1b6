"""Triton's decorator decides when a kernel's module is imported: here it must choose the interpreter."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
