"""The engine's device side on a GPU: rows of a step (``rows``), their way there (``inputs``), CUDA graphs (``graphs``,
``prompt_graphs``).

A step is one copy to the device, one graph replay (or, where no graph has room for it, an eager forward) and one copy
back.
"""
