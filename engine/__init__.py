"""The engine process: token ids and memory. It never sees a name, a key or a text.

wire    messages ring link connection client settings     standard library, msgspec
policy  spec image plan limits request pool residency waiting seats turns scheduler     no torch
device  memory loader batch runner sampler model     torch and kernels
worker  the step loop; ``python -m stencilpress.engine`` starts it
"""
