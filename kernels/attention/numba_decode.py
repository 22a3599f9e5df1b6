"""Rotation, the writing of keys and values, and attention of single rows, on a CPU by one thread.

The contract is in the package.
A page of the pool holds (layer, K|V, token, kv_head, head_dim); ``pool_E`` is flat.
"""

# T rows, H query heads, K key-value heads, G = H / K, D head dimension, P positions, B decodes, N pages, S attended

from __future__ import annotations

import numpy as np

from stencilpress.kernels.norm.numba_rms_norm import norm_row
from stencilpress.kernels.numba_bits import exp, inline, jit, narrow, widen


@jit
def rotate_and_write(
    qkv_TX, heads, q_norm_D, k_norm_D, eps, cos_PD, sin_PD, positions_T, pool_E, rows_T, first_row, page_tokens
):
    """Norm (if there are weights) and rotate q and k in place, then store k and v of every row.

    A row of the pool is what all key-value heads of a token hold. The key of row t goes to pool row
    ``rows_T[t] + first_row``, its value ``page_tokens`` rows further.
    """
    head_dim = 2 * cos_PD.shape[1]
    kv_size = (qkv_TX.shape[1] - heads * head_dim) // 2
    kv_start = heads * head_dim
    for t in range(qkv_TX.shape[0]):
        cos_D, sin_D = cos_PD[positions_T[t]], sin_PD[positions_T[t]]
        for start in range(0, kv_start + kv_size, head_dim):
            x_D = qkv_TX[t, start : start + head_dim]
            norm_D = q_norm_D if start < kv_start else k_norm_D
            if norm_D.shape[0]:
                norm_row(x_D, norm_D, eps, x_D)
            _rotate(x_D, cos_D, sin_D)
        k_start = (rows_T[t] + first_row) * kv_size
        v_start = k_start + page_tokens * kv_size
        for i in range(kv_size):
            pool_E[k_start + i] = qkv_TX[t, kv_start + i]
            pool_E[v_start + i] = qkv_TX[t, kv_start + kv_size + i]


@inline
def _rotate(x_D, cos_D, sin_D):
    half = cos_D.shape[0]
    for i in range(half):
        low, high = widen(x_D[i]), widen(x_D[half + i])
        cos, sin = widen(cos_D[i]), widen(sin_D[i])
        x_D[i] = narrow(widen(narrow(low * cos, x_D)) - widen(narrow(high * sin, x_D)), x_D)
        x_D[half + i] = narrow(widen(narrow(high * cos, x_D)) + widen(narrow(low * sin, x_D)), x_D)


@jit
def attend_decodes(
    qkv_TX, rows_B, pages_BN, lengths_B, pool_E, page_rows, first_row, page_tokens, kv_heads, head_dim, out_TX
):
    """Row ``rows_B[b]`` attends to the ``lengths_B[b]`` positions in the pages ``pages_BN[b]``; all in float32."""
    group = out_TX.shape[1] // (kv_heads * head_dim)
    scale = np.float32(head_dim) ** np.float32(-0.5)
    kv_size = kv_heads * head_dim
    q_GD = np.empty((group, head_dim), np.float32)
    out_GD = np.empty((group, head_dim), np.float32)
    score_GS = np.empty((group, lengths_B.max() + 3), np.float32)
    starts_S = np.empty(lengths_B.max(), np.int64)
    for b in range(rows_B.shape[0]):
        t, length = rows_B[b], lengths_B[b]
        for s in range(length):
            row = pages_BN[b, s // page_tokens] * page_rows + first_row + s % page_tokens
            starts_S[s] = row * kv_size
        for k in range(kv_heads):
            for g in range(group):
                for i in range(head_dim):
                    q_GD[g, i] = widen(qkv_TX[t, (k * group + g) * head_dim + i]) * scale
            _score(q_GD, pool_E, starts_S[:length], k * head_dim, score_GS)
            for g in range(group):
                _softmax(score_GS[g, :length])
            score_GS[:, length : length + 3] = 0
            _mix(score_GS, pool_E, starts_S[:length], page_tokens * kv_size + k * head_dim, out_GD)
            for g in range(group):
                for i in range(head_dim):
                    out_TX[t, (k * group + g) * head_dim + i] = narrow(out_GD[g, i], out_TX)


@inline
def _score(q_GD, pool_E, starts_S, offset, score_GS):
    """Four keys a pass: a sum of one is mostly its own latency."""
    head_dim, length = q_GD.shape[1], starts_S.shape[0]
    for s in range(0, length, 4):
        a, b, c, d = _four(pool_E, starts_S, offset, s, head_dim)
        for g in range(q_GD.shape[0]):
            score_a = score_b = score_c = score_d = np.float32(0)
            for i in range(head_dim):
                q = q_GD[g, i]
                score_a += q * widen(a[i])
                score_b += q * widen(b[i])
                score_c += q * widen(c[i])
                score_d += q * widen(d[i])
            score_GS[g, s], score_GS[g, s + 1], score_GS[g, s + 2], score_GS[g, s + 3] = (
                score_a,
                score_b,
                score_c,
                score_d,
            )


@inline
def _four(pool_E, starts_S, offset, s, head_dim):
    """The keys or values at four positions from ``s`` on; the last again for those past the end."""
    last = starts_S.shape[0] - 1
    a = starts_S[s] + offset
    b = starts_S[min(s + 1, last)] + offset
    c = starts_S[min(s + 2, last)] + offset
    d = starts_S[min(s + 3, last)] + offset
    return pool_E[a : a + head_dim], pool_E[b : b + head_dim], pool_E[c : c + head_dim], pool_E[d : d + head_dim]


@inline
def _softmax(score_S):
    highest = score_S[0]
    for s in range(score_S.shape[0]):
        highest = max(highest, score_S[s])
    total = np.float32(0)
    for s in range(score_S.shape[0]):
        weight = exp(score_S[s] - highest)
        score_S[s] = weight
        total += weight
    for s in range(score_S.shape[0]):
        score_S[s] /= total


@inline
def _mix(weight_GS, pool_E, starts_S, offset, out_GD):
    """Four values a pass, so that the sums are read and written a quarter as often."""
    head_dim, length = out_GD.shape[1], starts_S.shape[0]
    out_GD[:] = 0
    for s in range(0, length, 4):
        a, b, c, d = _four(pool_E, starts_S, offset, s, head_dim)
        for g in range(out_GD.shape[0]):
            weight_a, weight_b = weight_GS[g, s], weight_GS[g, s + 1]
            weight_c, weight_d = weight_GS[g, s + 2], weight_GS[g, s + 3]
            for i in range(head_dim):
                out_GD[g, i] += (weight_a * widen(a[i]) + weight_b * widen(b[i])) + (
                    weight_c * widen(c[i]) + weight_d * widen(d[i])
                )
