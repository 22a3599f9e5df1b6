"""Device operations, one folder each: contract and reference first, faster kernels beside them."""
