"""One shared base model, thousands of LoRA adapters on top.

The packages stand at the top level of the repository and are linked into this one, so that an
installation owns the single name ``stencilpress`` (docs/decisions/0001-package-names.md).
"""

__version__ = "0.1.0"
