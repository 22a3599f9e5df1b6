// The expand of blocks of many rows, in bf16, on Hopper and later: what triton_blocks.py's expand computes for blocks of
// one item each, with y in the very registers that tensor cores add to, and no work beyond a block's own rank.
//
// A warp takes OF_WARP outputs of all rows of a block. Its weights are a of every product: a lane loads eight outputs of
// four slices, and pairs of slices come together by permuting bytes. Of y a lane holds eight outputs of two rows in eight,
// and DEPTH eights of rows are on their way while one is computed. b are the shrink's sums, in two parts (round_rest).
//
// STEPS: ranks of an item / 16. Each product takes 16; those beyond what the block's adapter has are left out.

#include "common.cuh"

constexpr int WARPS = 8, OF_WARP = 64, RUN = WARPS * OF_WARP, ROWS = 64, EIGHTS = ROWS / 8, RANKS = STEPS * 16;
static_assert(WARPS == EIGHTS, "each warp makes the sums of eight rows");

struct Expand {
    u16 *y;
    const u16 *pool;
    const int *counts;
    const int4 *blocks;
    const long long *addresses;
    const int4 *entries;
    const float *partial;  // (items, projections, parts, ROWS, RANKS)
    int entry, max_items, y_stride, parts, tiles;
    Group group;
};
static_assert(sizeof(Expand) == PARAMETER_BYTES, "the caller has another structure");

__device__ __forceinline__ uint4 load_weights(const u16 *at, bool there, u64 policy) {
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(at), "r"((u32)there), "l"(policy) : "memory");
    return v;
}

__device__ __forceinline__ float2 load_two(const float *at, bool there) {
    float2 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
                 "@p ld.global.cg.v2.f32 {%0, %1}, [%2];\n}"
                 : "=&f"(v.x), "=&f"(v.y) : "l"(at), "r"((u32)there) : "memory");
    return v;
}

__device__ __forceinline__ u32 word(const uint4 &v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }

// Output t of eight, of two slices.
__device__ __forceinline__ u32 pair(const uint4 &one, const uint4 &two, int t) {
    return __byte_perm(word(one, t / 2), word(two, t / 2), t % 2 ? 0x7632 : 0x5410);
}

// b of rows m = 8 * eight + g, for every step: the sums' rounded values in two words, what that lost in two more.
__device__ __forceinline__ void make_sums(const Expand &a, const float *planes, float scale, int m, int rows, u32 there,
                                          int steps, int j, uint4 (*sums)[LANES], int lane) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        float2 one = make_float2(0, 0), two = make_float2(0, 0);
        for (int k = 0; k < a.parts; k++) {  // without another end, so that several are on their way together
            const float *at = planes + (long long)k * (ROWS * RANKS) + m * RANKS + s * 16 + 2 * j;
            float2 v = load_two(at, m < rows && s < steps), w = load_two(at + 8, m < rows && s < steps);
            one.x += v.x, one.y += v.y, two.x += w.x, two.y += w.y;
        }
        u32 mine = there >> (s * 4);  // a sum without a slice is none
        one.x = mine & 1 ? one.x * scale : 0, one.y = mine & 2 ? one.y * scale : 0;
        two.x = mine & 4 ? two.x * scale : 0, two.y = mine & 8 ? two.y * scale : 0;
        u32 b0 = round_pair(one.x, one.y), b1 = round_pair(two.x, two.y);
        sums[s][lane] = make_uint4(b0, b1, round_rest(one.x, one.y, b0), round_rest(two.x, two.y, b1));
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *LANES, 2) expand(const __grid_constant__ Expand a) {
    __shared__ uint4 sums[EIGHTS][STEPS][LANES];
    launch_dependents();
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, j = lane % 4, g = lane / 4;
    int block = blockIdx.x / a.tiles, tile = blockIdx.x % a.tiles;
    int second = (a.group.widths[0] + RUN - 1) / RUN, third = second + (a.group.widths[1] + RUN - 1) / RUN;
    int p = (tile >= second) + (tile >= third && a.group.widths[2]);
    tile -= p == 0 ? 0 : p == 1 ? second : third;
    long long place = (long long)a.entry * a.max_items + block;
    const long long *addresses = a.addresses + place * RANKS;
    int4 entry = a.entries[place], facts = a.blocks[block];
    int row = facts.x, rows = facts.y, o = tile * RUN + warp * OF_WARP + g * 8;
    bool wanted = block < a.counts[0] && (entry.x >> p & 1), inside = wanted && o < width_of(a.group, p);
    const u16 *from = a.pool + start_of_B(a.group, entry.x, p) + o;
    u64 policy = read_once();
    int steps = 0;
    u32 there = 0;
    uint4 loaded[STEPS][4];  // slices 2j, 2j + 1, 2j + 8 and 2j + 9 of a step
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            long long address = addresses[s * 16 + 2 * j + n % 2 + n / 2 * 8];
            if (address >= 0) steps = s + 1, there |= 1u << (s * 4 + n);
            loaded[s][n] = load_weights(from + address, inside && address >= 0, policy);
        }
    steps = __reduce_max_sync(~0u, steps);
    u16 *y = a.y + (long long)(row + 2 * j) * a.y_stride + column_of(a.group, p) + o;
    uint4 ahead[DEPTH][2];
#pragma unroll
    for (int n = 0; n < DEPTH; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            ahead[n][i] = load_eight(y + (long long)(n * 8 + i) * a.y_stride, inside && n * 8 + 2 * j + i < rows);
    wait_for_predecessor();
    if (!wanted) return;
    const float *planes = a.partial + (long long)(block * a.group.projections + p) * a.parts * (ROWS * RANKS);
    make_sums(a, planes, scale_of(entry, p), warp * 8 + g, rows, there, steps, j, sums[warp], lane);
    u32 weights[STEPS][4][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int t = 0; t < 4; t++) {  // rows of a: output t of the eight of lane 4g, then t + 4
            weights[s][t][0] = pair(loaded[s][0], loaded[s][1], t), weights[s][t][1] = pair(loaded[s][0], loaded[s][1], t + 4);
            weights[s][t][2] = pair(loaded[s][2], loaded[s][3], t), weights[s][t][3] = pair(loaded[s][2], loaded[s][3], t + 4);
        }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        uint4 one = ahead[n % DEPTH][0], two = ahead[n % DEPTH][1];
        if (n + DEPTH < EIGHTS)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int m = (n + DEPTH) * 8 + i;
                ahead[n % DEPTH][i] = load_eight(y + (long long)m * a.y_stride, inside && m + 2 * j < rows);
            }
        float c[4][4] = {{low_float(one.x), low_float(two.x), low_float(one.z), low_float(two.z)},
                         {high_float(one.x), high_float(two.x), high_float(one.z), high_float(two.z)},
                         {low_float(one.y), low_float(two.y), low_float(one.w), low_float(two.w)},
                         {high_float(one.y), high_float(two.y), high_float(one.w), high_float(two.w)}};
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (s < steps) {
                uint4 h = sums[n][s][lane];
#pragma unroll
                for (int t = 0; t < 4; t++) multiply(c[t], weights[s][t], h.x, h.y);
#pragma unroll
                for (int t = 0; t < 4; t++) multiply(c[t], weights[s][t], h.z, h.w);
            }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (inside && n * 8 + 2 * j + i < rows)
                *(uint4 *)(y + (long long)(n * 8 + i) * a.y_stride) =
                    make_uint4(round_pair(c[0][i], c[1][i]), round_pair(c[2][i], c[3][i]),
                               round_pair(c[0][2 + i], c[1][2 + i]), round_pair(c[2][2 + i], c[3][2 + i]));
    }
}
