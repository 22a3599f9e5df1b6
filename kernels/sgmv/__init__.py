"""Segmented gather matrix-vector product: the LoRA delta of a mixed batch over the unified pool.

Semantics: for each segment s with rows t in [row_start[s], row_start[s + 1]), and each projection p of
the group that the segment's adapter adapts,

    y[t, off_p + o] += scale[s, p] * sum_j (sum_i x[t, i] * A[s, p, j, i]) * B[s, p, j, o]

with j over the adapter's rank in this (layer, group). Rows of segments without an adapter, and the
columns of projections that an adapter leaves alone, are not touched.

Where A and B live. The pool is one flat tensor. Rank slice j of one (layer, group) holds, for the
adapted projections in group order, first their rows of A (in_features each), then their rows of Bᵀ
(out_features each), padded to 8 elements. A slice never straddles a page. Each resident adapter carries
a slice table in its own pages, int64 words, 8-byte aligned, little-endian; L layers, G groups:

    words 4e .. 4e+3, entry e = layer * G + group
        4e      rank (low 32 bits) | bit mask of the adapted projections (high 32 bits)
        4e + 1  index of the entry's first slice in the address list
        4e + 2  fp32 scale of projection 0 (low), of projection 1 (high)
        4e + 3  fp32 scale of projection 2 (low) | elements of a slice (high 32 bits)
    words 4LG .. the address list: element offset in the pool of each slice

Scales are never folded into the weights. Adapters of projections with unequal ranks inside a group are
zero-filled up to the largest.
"""
