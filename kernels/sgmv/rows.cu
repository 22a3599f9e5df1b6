// The segmented product for blocks of one row each, in bf16, on Hopper and later: what triton_rows.py computes.
//
// The work is cut into units: a shrink takes RUN inputs of one item and projection, an expand RUN outputs of a block, one
// item after the other. There are as many programs as the device holds at once; each takes every so manyth unit. While it
// multiplies one item's weights, the next one's come to shared memory by the copy engine, and so do the rows and sums that
// it needs: a program that waits asks for nothing meanwhile, and only bytes on their way keep the memory busy. Items that
// a list has room for cost nothing.
//
// Sums travel in mailboxes: a word is EMPTY until its sum is stored there, and its only reader empties it again. So
// nothing is counted, nothing fenced, and the sums need no second trip. A shrink's sums go to every expand of its
// projection, which adds them in an order of their own: no sum depends on timing.
//
// Waiting inside a launch is safe because all programs are there at once, each takes its units in the order of their
// numbers, and only expands wait, for shrinks, whose numbers are lower.

#include "common.cuh"

constexpr int SLICES = 16, WARPS = 4, THREADS = WARPS * LANES, OF_THREAD = 8, RUN = THREADS * OF_THREAD;
constexpr int TILE = SLICES * RUN;  // elements of a unit's weights: of each slice a run
constexpr int AT_ONCE = 8;          // slices whose weights a thread has in registers
constexpr u32 EMPTY = 0xffffffffu, NAN_BITS = 0x7fffffffu;  // a NaN that arithmetic never gives, and the one it gives

struct Rows {
    const u16 *x;
    u16 *y;
    const u16 *pool;
    const int2 *counts;
    const int4 *blocks, *items;
    const long long *addresses;
    const int4 *entries;
    u32 *sums;  // mailboxes: (items, tiles, parts, SLICES)
    const int *listed;  // (rows), not zero for those of the list; none: the products are added to y instead of replacing it
    int entry, max_items, x_stride, y_stride, parts, tiles, rows;
    Group group;
};
static_assert(sizeof(Rows) == PARAMETER_BYTES, "the caller has another structure");

// `nth` is the unit's part of the inputs or its tile of projection p's outputs; `item` is the shrink's item or, of an
// expand, the first of its block.
struct Unit {
    bool shrink;
    int item, p, nth, first_tile, start, width;
};

__device__ __forceinline__ int tiles_of(int width) { return (width + RUN - 1) / RUN; }

__device__ __forceinline__ int shrinks_of(const Rows &a, int2 counts) { return counts.y * a.group.projections * a.parts; }

// Items from the last to the first, blocks from the last, which has most items, to the first.
__device__ __forceinline__ Unit unit_of(const Rows &a, int number, int2 counts) {
    Unit u;
    int of_item = a.group.projections * a.parts, last = counts.y - 1;
    u.shrink = number < shrinks_of(a, counts);
    if (!u.shrink) number -= shrinks_of(a, counts), of_item = a.tiles, last = counts.x - 1;
    int back = number / of_item, rest = number - back * of_item;
    u.item = last - back;
    int second = tiles_of(a.group.widths[0]), third = second + tiles_of(a.group.widths[1]);
    u.p = u.shrink ? rest / a.parts : (rest >= second) + (rest >= third && a.group.widths[2]);
    u.first_tile = u.p == 0 ? 0 : u.p == 1 ? second : third;
    u.nth = rest - (u.shrink ? u.p * a.parts : u.first_tile);
    u.start = u.nth * RUN;
    u.width = u.shrink ? a.group.inputs : width_of(a.group, u.p);
    return u;
}

// The program's next unit. Whose first expand was among the largest gets one of the smallest next.
__device__ __forceinline__ int unit_after(const Rows &a, int number, int2 counts) {
    int programs = gridDim.x, nth_expand = number - shrinks_of(a, counts);
    return nth_expand < 0 || nth_expand >= programs ? number + programs : number + 2 * (programs - nth_expand) - 1;
}

__device__ __forceinline__ u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void wait_landed(u32 barrier, int turn) {
    u32 done;
    do asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(turn) : "memory");
    while (!done);
}

__device__ __forceinline__ uint4 look(const u32 *at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ bool arrived(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

__device__ __forceinline__ void empty(u32 *at) { *(uint4 *)at = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }

__device__ __forceinline__ u32 letter(float sum) {
    u32 bits = __float_as_uint(sum);
    return bits == EMPTY ? NAN_BITS : bits;
}

__device__ __forceinline__ void send(u32 *at, const float *four) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(letter(four[0])),
                 "r"(letter(four[1])), "r"(letter(four[2])), "r"(letter(four[3])) : "memory");
}

// An item of a unit, what the tables say of it, and what it multiplies or adds to, which is asked for before its turn.
struct Task {
    int number;  // of the unit
    Unit u;
    bool there;
    int item, nth_item;
    int2 block;         // of an expand: items, and where the second one is
    long long address;  // of slice `lane`; -1 where there is none
    int4 entry;
    int of_row;
    uint4 row;   // the thread's eight of x, or of the y that the last item of a block is added to
    uint4 sums;  // of the first warp's threads: four of the first that an expand waits for

    __device__ __forceinline__ bool adapted() const { return there && (entry.x >> u.p & 1); }
    __device__ __forceinline__ bool last() const { return u.shrink || nth_item + 1 == block.x; }
};

__device__ __forceinline__ void look_up_item(const Rows &a, Task &t, int lane) {
    long long place = (long long)a.entry * a.max_items + t.item;
    t.address = -1;
    if (lane < SLICES) t.address = a.addresses[place * SLICES + lane];
    t.entry = a.entries[place], t.of_row = a.items[t.item].x;
}

__device__ __forceinline__ Task look_up(const Rows &a, int number, int2 counts, int lane) {
    Task t;
    t.number = number, t.there = number < shrinks_of(a, counts) + counts.x * a.tiles;
    if (!t.there) return t;
    t.u = unit_of(a, number, counts);
    t.item = t.u.item, t.nth_item = 0;
    if (!t.u.shrink) t.block = *(const int2 *)&a.blocks[t.item].z;
    look_up_item(a, t, lane);
    return t;
}

// What comes after a task: the block's next item, or the first of the program's next unit.
__device__ __forceinline__ Task follow(const Rows &a, const Task &past, int2 counts, int lane) {
    if (!past.there || past.last()) return look_up(a, unit_after(a, past.number, counts), counts, lane);
    Task t = past;
    t.item = past.block.y + past.nth_item, t.nth_item = past.nth_item + 1;
    look_up_item(a, t, lane);
    return t;
}

__device__ __forceinline__ u32 slices_of(const Task &t) { return __ballot_sync(~0u, t.address >= 0); }

// The weights: each warp asks for those of some slices, a slice a lane.
__device__ __forceinline__ void bring(const Rows &a, const Task &t, u16 *tile, u32 barrier, int warp, int lane) {
    u32 bytes = min(RUN, t.u.width - t.u.start) * 2, slices = slices_of(t);
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes * __popc(slices)) : "memory");
    int mask = t.entry.x;
    int start = t.u.start + (t.u.shrink ? start_of_A(a.group, mask, t.u.p) : start_of_B(a.group, mask, t.u.p));
    if (lane / (SLICES / WARPS) == warp && t.address >= 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            ::"r"(shared(tile + lane * RUN)), "l"(a.pool + t.address + start), "r"(bytes), "r"(barrier),
            "l"(read_once()) : "memory");
}

__device__ __forceinline__ u32 *sums_for(const Rows &a, const Unit &u, int item) {
    return a.sums + ((long long)item * a.tiles + u.first_tile + u.nth) * a.parts * SLICES;
}

// What predecessors wrote, and sums, which may not have come yet.
__device__ __forceinline__ void ask(const Rows &a, Task &t) {
    int i = t.u.start + threadIdx.x * OF_THREAD;
    bool inside = i < t.u.width;
    if (t.u.shrink) {
        t.row = load_eight(a.x + (long long)t.of_row * a.x_stride + i, inside);
        return;
    }
    if (t.last() && !a.listed)
        t.row = load_eight(a.y + (long long)t.of_row * a.y_stride + column_of(a.group, t.u.p) + i, inside);
    if (threadIdx.x < LANES && threadIdx.x * 4 < a.parts * SLICES)
        t.sums = look(sums_for(a, t.u, t.item) + threadIdx.x * 4);
}

__device__ __forceinline__ void floats(float (&f)[OF_THREAD], uint4 v) {
    f[0] = low_float(v.x), f[1] = high_float(v.x), f[2] = low_float(v.y), f[3] = high_float(v.y);
    f[4] = low_float(v.z), f[5] = high_float(v.z), f[6] = low_float(v.w), f[7] = high_float(v.w);
}

template <int HALF>
__device__ __forceinline__ void halve(float (&sums)[SLICES], int lane) {
    bool upper = lane & 2 * HALF;
#pragma unroll
    for (int s = 0; s < HALF; s++) {
        float give = upper ? sums[s] : sums[s + HALF], keep = upper ? sums[s + HALF] : sums[s];
        sums[s] = keep + __shfl_xor_sync(~0u, give, 2 * HALF);
    }
}

// Lanes 2 s and 2 s + 1 get the sum of all lanes' sums[s].
__device__ __forceinline__ float sum_of_lanes(float (&sums)[SLICES], int lane) {
    halve<8>(sums, lane), halve<4>(sums, lane), halve<2>(sums, lane), halve<1>(sums, lane);
    return sums[0] + __shfl_xor_sync(~0u, sums[0], 1);
}

__device__ __forceinline__ void shrink(const Rows &a, const Task &t, const u16 *tile, float (*by_warp)[SLICES], int warp,
                                       int lane) {
    int own = threadIdx.x * OF_THREAD;
    bool inside = t.u.start + own < t.u.width;
    u32 slices = slices_of(t);
    float x[OF_THREAD], sums[SLICES] = {};
    floats(x, t.row);
#pragma unroll
    for (int first = 0; first < SLICES; first += AT_ONCE) {
        if (!(slices >> first & ((1 << AT_ONCE) - 1))) break;
#pragma unroll
        for (int s = first; s < first + AT_ONCE; s++) {
            float w[OF_THREAD];
            floats(w, *(const uint4 *)(tile + s * RUN + own));
            float even = x[0] * w[0], odd = x[1] * w[1];
#pragma unroll
            for (int n = 2; n < OF_THREAD; n += 2) even = fmaf(x[n], w[n], even), odd = fmaf(x[n + 1], w[n + 1], odd);
            sums[s] = inside && slices >> s & 1 ? even + odd : 0;
        }
    }
    float sum = sum_of_lanes(sums, lane);
    if (lane % 2 == 0) by_warp[warp][lane / 2] = sum;
    __syncthreads();
    int readers = tiles_of(width_of(a.group, t.u.p));
    for (int n = threadIdx.x; n < readers * 4; n += THREADS) {
        int r = n % 4 * 4, tile_of_item = t.u.first_tile + n / 4;
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            four[i] = (by_warp[0][r + i] + by_warp[1][r + i]) + (by_warp[2][r + i] + by_warp[3][r + i]);
        send(a.sums + (((long long)t.item * a.tiles + tile_of_item) * a.parts + t.u.nth) * SLICES + r, four);
    }
}

// The first warp takes the sums of all parts out of the mailboxes: lane 4 k + q those of slices 4 q to 4 q + 3, of part k
// and of every eighth after it.
__device__ __forceinline__ void receive(const Rows &a, const Task &t, float *h, int lane) {
    u32 *from = sums_for(a, t.u, t.item), slices = slices_of(t);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int n = lane * 4; n < a.parts * SLICES; n += LANES * 4) {
        uint4 four = t.sums;
        if (n >= LANES * 4) four = look(from + n);
        while (!arrived(four)) four = look(from + n);
        empty(from + n);
        sum.x += __uint_as_float(four.x), sum.y += __uint_as_float(four.y);
        sum.z += __uint_as_float(four.z), sum.w += __uint_as_float(four.w);
    }
    __syncwarp();
#pragma unroll
    for (int bit = 4; bit < LANES; bit *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, bit), sum.y += __shfl_xor_sync(~0u, sum.y, bit);
        sum.z += __shfl_xor_sync(~0u, sum.z, bit), sum.w += __shfl_xor_sync(~0u, sum.w, bit);
    }
    if (lane >= 4) return;
    float scale = scale_of(t.entry, t.u.p);
    u32 own = slices >> lane * 4;
    *(float4 *)(h + lane * 4) = make_float4(own & 1 ? sum.x * scale : 0, own & 2 ? sum.y * scale : 0,
                                            own & 4 ? sum.z * scale : 0, own & 8 ? sum.w * scale : 0);
}

// Eight outputs a thread: the share of one item comes to `sum`, that of the last one with them to y.
__device__ __forceinline__ void expand(const Rows &a, const Task &t, const u16 *tile, const float *h,
                                       float (&sum)[OF_THREAD]) {
    int own = threadIdx.x * OF_THREAD, o = t.u.start + own;
    u32 slices = slices_of(t);
    if (t.nth_item == 0) {
#pragma unroll
        for (int n = 0; n < OF_THREAD; n++) sum[n] = 0;
    }
    if (o >= t.u.width) return;
#pragma unroll
    for (int first = 0; first < SLICES; first += AT_ONCE) {
        if (!(slices >> first & ((1 << AT_ONCE) - 1))) break;
#pragma unroll
        for (int s = first; s < first + AT_ONCE; s++) {
            uint4 weights = *(const uint4 *)(tile + s * RUN + own);
            if (!(slices >> s & 1)) weights = make_uint4(0, 0, 0, 0);
            float w[OF_THREAD], factor = h[s];
            floats(w, weights);
#pragma unroll
            for (int n = 0; n < OF_THREAD; n++) sum[n] = fmaf(factor, w[n], sum[n]);
        }
    }
    if (!t.last()) return;
    uint4 old = a.listed ? make_uint4(0, 0, 0, 0) : t.row;
    *(uint4 *)(a.y + (long long)t.of_row * a.y_stride + column_of(a.group, t.u.p) + o) =
        make_uint4(round_pair(low_float(old.x) + sum[0], high_float(old.x) + sum[1]),
                   round_pair(low_float(old.y) + sum[2], high_float(old.y) + sum[3]),
                   round_pair(low_float(old.z) + sum[4], high_float(old.z) + sum[5]),
                   round_pair(low_float(old.w) + sum[6], high_float(old.w) + sum[7]));
}

__device__ __forceinline__ void clear(const Rows &a, int row, int column, int width) {
    u16 *y = a.y + (long long)row * a.y_stride + column;
    for (int i = threadIdx.x * OF_THREAD; i < width; i += THREADS * OF_THREAD) *(uint4 *)(y + i) = make_uint4(0, 0, 0, 0);
}

// Rows that are not in the list have no share.
__device__ __forceinline__ void clear_others(const Rows &a) {
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x)
        if (!a.listed[row]) clear(a, row, 0, a.group.widths[0] + a.group.widths[1] + a.group.widths[2]);
}

extern __shared__ __align__(128) u16 tiles[];  // two

// Three programs a multiprocessor: as many as its shared memory holds.
extern "C" __global__ void __launch_bounds__(THREADS, 3) rows(const __grid_constant__ Rows a) {
    __shared__ float by_warp[WARPS][SLICES];
    __shared__ alignas(16) float h[SLICES];
    __shared__ u64 landed[2];
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int2 counts = *a.counts;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; n++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(landed + n)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    Task next = look_up(a, blockIdx.x, counts, lane);
    if (next.adapted()) bring(a, next, tiles, shared(landed), warp, lane);
    Task after = follow(a, next, counts, lane);
    wait_for_predecessor();
    if (next.adapted()) ask(a, next);
    if (a.listed) clear_others(a);
    u32 turns = 0;  // a bit for each tile: which turn of its barrier comes next
    float sum[OF_THREAD];
    for (int n = 0; next.there; n ^= 1) {
        Task now = next;
        next = after;
        if (next.adapted()) {
            bring(a, next, tiles + (n ^ 1) * TILE, shared(landed + (n ^ 1)), warp, lane);
            ask(a, next);
        }
        after = follow(a, next, counts, lane);
        if (now.adapted()) {
            if (!now.u.shrink) {
                if (warp == 0) receive(a, now, h, lane);
                __syncthreads();
            }
            wait_landed(shared(landed + n), turns >> n & 1);
            turns ^= 1 << n;
            if (now.u.shrink)
                shrink(a, now, tiles + n * TILE, by_warp, warp, lane);
            else
                expand(a, now, tiles + n * TILE, h, sum);
        } else if (a.listed && !now.u.shrink) {
            clear(a, now.of_row, column_of(a.group, now.u.p) + now.u.start, min(RUN, now.u.width - now.u.start));
        }
        __syncthreads();  // the tile, h and by_warp are free
    }
}
