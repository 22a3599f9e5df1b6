"""An adapter as one stream of rank slices: built at intake, the same on disk and in host memory.

A slice is rank index j of one (layer, group): row j of A of each adapted projection of the group, then row j
of each Bᵀ, padded to 8 elements (kernels/sgmv has the arithmetic). Slices follow each other in the order
layer, group, j. The stream does not depend on the page size: a page takes one contiguous run of it.

This is the door to five files: ``image_format`` (file and reader), ``image_check`` (its checksum), ``image_layout``
(pages and slice table),
``image_build`` (conversion and digest), ``peft_format`` with ``peft_config`` (what an adapter means).
"""

from stencilpress.engine.image_build import Tensor, adapter_digest, build_image, is_finite, value_problem, write_image
from stencilpress.engine.image_format import (
    Image,
    ImageError,
    ImageHeader,
    Record,
    image_name,
    open_image,
    read_image,
    remove_outdated,
    remove_unfinished,
    unfinished_name,
)
from stencilpress.engine.image_layout import Layout, Run, layout, slice_table
from stencilpress.engine.peft_config import AdapterError, Finding, PeftConfig
from stencilpress.engine.peft_format import Module, module_name, places, resolve, split_tensor_name

__all__ = [
    "AdapterError",
    "Finding",
    "Image",
    "ImageError",
    "ImageHeader",
    "Layout",
    "Module",
    "PeftConfig",
    "Record",
    "Run",
    "Tensor",
    "adapter_digest",
    "build_image",
    "image_name",
    "is_finite",
    "layout",
    "module_name",
    "open_image",
    "places",
    "read_image",
    "remove_outdated",
    "remove_unfinished",
    "resolve",
    "slice_table",
    "split_tensor_name",
    "unfinished_name",
    "value_problem",
    "write_image",
]
