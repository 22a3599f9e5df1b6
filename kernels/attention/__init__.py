"""Paged attention over a mixed batch: decodes and chunks of prompts, whose keys and values lie in pages of the pool.

Semantics: a span s holds rows t = row .. row + length - 1 at positions start .. start + length - 1 of one request,
and the request's page table. For each row t at position p, query head h with key-value head g = h // (H / K):

    write   K[s, p, g], V[s, p, g] = k[t, g], v[t, g]
    attend  out[t, h] = sum_{u <= p} softmax_u(q[t, h] . K[s, u, g] / sqrt(D)) V[s, u, g]

T rows, H query heads, K key-value heads, D head dimension, S positions attended. q is (T, H * D), k and v are
(T, K * D), out is (T, H * D), all of the pool's dtype; rows may be strided, their elements are contiguous.

Where K and V live. The pool is one flat tensor of equal pages. A page holds ``page_tokens`` positions of all layers,
laid out (layer, K|V, token, kv_head, head_dim); position p of a request is token p % page_tokens of page
pages[p // page_tokens]. Pages come from a pool that adapters use too: positions not yet written may hold any bits,
NaN included, and are never read.

Spans of one batch are of distinct requests and cover its rows without gaps, in any order.
"""

from typing import NamedTuple


class Span(NamedTuple):
    """Neighbouring rows of one request. ``pages`` covers at least ``start + length`` positions."""

    row: int
    start: int
    length: int
    pages: tuple[int, ...]
