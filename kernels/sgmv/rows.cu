// The segmented product for blocks of one row each, in bf16, on Hopper and later: what triton_rows.py computes.
//
// Of a launch the first programs shrink: each takes RUN inputs of one item and projection. The others expand: each takes
// RUN outputs. Either's weights, a run of each of SLICES slices, come to shared memory by the copy engine, so that more
// are on their way than registers would hold, and are multiplied on tensor cores.
//
// Sums travel in mailboxes: a word is EMPTY until its sum is stored there, and its only reader empties it again. So
// nothing is counted, nothing fenced, and the sums need no second trip. A shrink's sums go to every expand of its
// projection; those of a block's further items go to the expand of its first, lane by lane, which adds them in order.
//
// Waiting inside a launch is safe because programs start in the order of their numbers, and each waits only for programs
// of lower numbers: expands for shrinks, first items for further ones (items are taken from the last to the first).

#include "common.cuh"

constexpr int SLICES = 16, RUN = 1024, WARPS = 4, OF_WARP = RUN / WARPS;
constexpr int PITCH = RUN + 8;  // elements from slice to slice: eight more put eight rows of a matrix in different banks
constexpr int MOST_PARTS = 32;
constexpr u32 EMPTY = 0xffffffffu, NAN_BITS = 0x7fffffffu;  // a NaN that arithmetic never gives, and the one it gives

struct Rows {
    const u16 *x;
    u16 *y;
    const u16 *pool;
    const int2 *counts;
    const int4 *blocks, *items;
    const long long *addresses;
    const int4 *entries;
    u32 *sums, *delta;  // mailboxes: (items, tiles, parts, SLICES), (items, columns of y)
    int entry, max_items, x_stride, y_stride, parts, tiles;
    Group group;
};
static_assert(sizeof(Rows) == PARAMETER_BYTES, "the caller has another structure");

// One program's share: `nth` is its part of the inputs or its tile of projection p's outputs.
struct Unit {
    bool shrink;
    int item, p, nth, first_tile, start, width;
};

__device__ __forceinline__ int tiles_of(int width) { return (width + RUN - 1) / RUN; }

__device__ __forceinline__ Unit unit_of(const Rows &a, int number) {
    Unit u;
    int of_item = a.group.projections * a.parts, shrinks = a.max_items * of_item;
    u.shrink = number < shrinks;
    if (!u.shrink) number -= shrinks, of_item = a.tiles;
    int back = number / of_item, rest = number - back * of_item;
    u.item = a.max_items - 1 - back;
    int second = tiles_of(a.group.widths[0]), third = second + tiles_of(a.group.widths[1]);
    u.p = u.shrink ? rest / a.parts : (rest >= second) + (rest >= third && a.group.widths[2]);
    u.first_tile = u.p == 0 ? 0 : u.p == 1 ? second : third;
    u.nth = rest - (u.shrink ? u.p * a.parts : u.first_tile);
    u.start = u.nth * RUN;
    u.width = u.shrink ? a.group.inputs : width_of(a.group, u.p);
    return u;
}

__device__ __forceinline__ u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void wait_landed(u32 barrier) {
    u32 done;
    do asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier) : "memory");
    while (!done);
    __syncwarp();
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

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 at) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}

// The first warp asks for the tile, a slice a lane; `address` is of slice `lane`, -1 where there is none. Where no weights
// come there are zeros: each warp's in its own columns, which no other warp reads.
__device__ __forceinline__ void bring(const Rows &a, const Unit &u, long long address, u32 slices, int mask, u16 *tile,
                                      u32 barrier, int warp, int lane) {
    int run = min(RUN, u.width - u.start);
    if (warp == 0) {
        u32 bytes = run * 2;
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(bytes * __popc(slices)) : "memory");
        __syncwarp();
        int start = u.start + (u.shrink ? start_of_A(a.group, mask, u.p) : start_of_B(a.group, mask, u.p));
        if (address >= 0)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                ::"r"(shared(tile) + lane * PITCH * 2), "l"(a.pool + address + start), "r"(bytes), "r"(barrier),
                "l"(read_once()) : "memory");
    }
    if (slices == (1u << SLICES) - 1 && run == RUN) return;
    for (int n = lane; n < SLICES * OF_WARP / 8; n += LANES) {
        int slice = n / (OF_WARP / 8), i = warp * OF_WARP + n % (OF_WARP / 8) * 8;
        if (!(slices >> slice & 1) || i >= run) *(uint4 *)(tile + slice * PITCH + i) = make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void shrink(const Rows &a, const Unit &u, int row, const u16 *tile, u16 *x,
                                       float (*by_warp)[SLICES], u32 barrier, int warp, int lane) {
    wait_for_predecessor();
    int own = warp * OF_WARP + lane * 8, i = u.start + own;
    *(uint4 *)(x + own) = load_eight(a.x + (long long)row * a.x_stride + i, i < u.width);
    wait_landed(barrier);
    // x is column 0 of b; four sums at once, as each waits for the one before
    float sums[4][4] = {};
    u32 from = shared(tile + lane % 16 * PITCH + warp * OF_WARP + lane / 16 * 8);
    const u32 *pairs = (const u32 *)(x + warp * OF_WARP) + lane % 4;
#pragma unroll
    for (int s = 0; s < OF_WARP / 16; s++) {
        u32 weights[4], low = pairs[s * 8], high = pairs[s * 8 + 4];
        load_matrices<false>(weights, from + s * 32);
        multiply(sums[s % 4], weights, lane < 4 ? low : 0, lane < 4 ? high : 0);
    }
    if (lane % 4 == 0) {
        by_warp[warp][lane / 4] = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
        by_warp[warp][lane / 4 + 8] = (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
    }
    __syncthreads();
    int readers = tiles_of(width_of(a.group, u.p));
    for (int n = warp * LANES + lane; n < readers * 4; n += WARPS * LANES) {
        int r = n % 4 * 4, tile_of_item = u.first_tile + n / 4;
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            four[i] = (by_warp[0][r + i] + by_warp[1][r + i]) + (by_warp[2][r + i] + by_warp[3][r + i]);
        send(a.sums + (((long long)u.item * a.tiles + tile_of_item) * a.parts + u.nth) * SLICES + r, four);
    }
}

// Take the sums of all parts out of the mailboxes, and turn them into b: where column g is even, their upper bits.
__device__ __forceinline__ void receive(const Rows &a, const Unit &u, float scale, u32 slices, float *parts, u32 (&h)[2],
                                        int warp, int lane) {
    u32 *from = a.sums + ((long long)u.item * a.tiles + u.first_tile + u.nth) * a.parts * SLICES;
    for (int n = (warp * LANES + lane) * 4; n < a.parts * SLICES; n += WARPS * LANES * 4) {
        uint4 four;
        do four = look(from + n);
        while (!arrived(four));
        empty(from + n);
        *(uint4 *)(parts + n) = four;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = half * 8 + lane % 4 * 2;
        const float *at = parts + r;
        float low = 0, high = 0;
        for (int k = 0; k < a.parts; k++) low += at[k * SLICES], high += at[k * SLICES + 1];
        low = slices >> r & 1 ? low * scale : 0, high = slices >> (r + 1) & 1 ? high * scale : 0;
        u32 upper = round_pair(low, high);
        h[half] = lane / 4 % 2 == 0 ? upper : round_rest(low, high, upper);
    }
}

// Eight outputs a lane, side by side: those of the lane's place among the warp's.
__device__ __forceinline__ void products(u16 *tile, const u32 (&h)[2], float (&sum)[8], int warp, int lane) {
    float low[4], high[4];
    u32 at = shared(tile + (lane / 16 * 8 + lane % 8) * PITCH + warp * OF_WARP + lane / 8 % 2 * 8);
#pragma unroll
    for (int s = 0; s < OF_WARP / 16; s++) {
        u32 weights[4];
        float both[4] = {};
        load_matrices<true>(weights, at + s * 32);
        multiply(both, weights, h[0], h[1]);
        if (s % 4 == lane % 4) low[s / 4] = both[0] + both[1], high[s / 4] = both[2] + both[3];
    }
    __syncwarp();
    // the warp's columns of two slices, read by now, hold its sums
    float *first = (float *)(tile + warp * OF_WARP), *second = first + PITCH / 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float *to = (n < 2 ? first : second) + n % 2 * 64 + lane % 4 * 16 + lane / 4;
        to[0] = low[n], to[8] = high[n];
    }
    __syncwarp();
    const float4 *own = (const float4 *)((lane < 16 ? first : second) + lane % 16 * 8);
    *(float4 *)sum = own[0], *(float4 *)(sum + 4) = own[1];
}

__device__ __forceinline__ void add(float *sum, uint4 four) {
    sum[0] += __uint_as_float(four.x), sum[1] += __uint_as_float(four.y);
    sum[2] += __uint_as_float(four.z), sum[3] += __uint_as_float(four.w);
}

// Eight sums of each of `count` mailboxes, which are empty then; three of them on their way together.
__device__ __forceinline__ void add_letters(float (&sum)[8], u32 *from, int pitch, int count) {
    for (int past = 0; past < count; past += 3) {
        uint4 low[3], high[3];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int n = 0; n < 3; n++)
                if (past + n < count) low[n] = look(from + n * pitch), high[n] = look(from + n * pitch + 4);
#pragma unroll
            for (int n = 0; n < 3; n++)
                if (past + n < count) all &= arrived(low[n]) && arrived(high[n]);
        } while (!all);
#pragma unroll
        for (int n = 0; n < 3; n++)
            if (past + n < count) {
                empty(from + n * pitch), empty(from + n * pitch + 4);
                add(sum, low[n]), add(sum + 4, high[n]);
            }
        from += 3 * pitch;
    }
}

__device__ __forceinline__ void expand(const Rows &a, const Unit &u, int row, int of_block, float scale, u32 slices,
                                       u16 *tile, float *parts, u32 barrier, int warp, int lane) {
    bool first = u.item < a.counts->x;
    int4 block = a.blocks[first ? u.item : of_block];
    int o = u.start + warp * OF_WARP + lane * 8, columns = a.group.widths[0] + a.group.widths[1] + a.group.widths[2];
    int column = column_of(a.group, u.p) + o;
    bool inside = o < u.width;
    u16 *y = a.y + (long long)row * a.y_stride + column;
    wait_for_predecessor();
    uint4 old = load_eight(y, first && inside);
    u32 h[2];
    receive(a, u, scale, slices, parts, h, warp, lane);
    wait_landed(barrier);
    float sum[8];
    products(tile, h, sum, warp, lane);
    if (!inside) return;
    if (!first) {
        u32 *to = a.delta + (long long)u.item * columns + column;
        send(to, sum), send(to + 4, sum + 4);
        return;
    }
    add_letters(sum, a.delta + (long long)block.w * columns + column, columns, block.z - 1);
    *(uint4 *)y = make_uint4(round_pair(low_float(old.x) + sum[0], high_float(old.x) + sum[1]),
                             round_pair(low_float(old.y) + sum[2], high_float(old.y) + sum[3]),
                             round_pair(low_float(old.z) + sum[4], high_float(old.z) + sum[5]),
                             round_pair(low_float(old.w) + sum[6], high_float(old.w) + sum[7]));
}

// Six programs a multiprocessor: as many as its shared memory holds.
extern "C" __global__ void __launch_bounds__(WARPS *LANES, 6) rows(const __grid_constant__ Rows a) {
    __shared__ alignas(128) u16 tile[SLICES * PITCH];
    __shared__ alignas(16) float parts[MOST_PARTS * SLICES];  // of an expand's sums; of a shrink its run of x
    __shared__ float by_warp[WARPS][SLICES];
    __shared__ u64 landed;
    launch_dependents();
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Unit u = unit_of(a, blockIdx.x);
    long long place = (long long)a.entry * a.max_items + u.item;
    long long address = lane < SLICES ? a.addresses[place * SLICES + lane] : -1;
    int4 entry = a.entries[place], item = a.items[u.item];
    int live = a.counts->y;
    u32 barrier = shared(&landed);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (u.item >= live || !(entry.x >> u.p & 1)) {
        wait_for_predecessor();
        return;
    }
    u32 slices = __ballot_sync(~0u, address >= 0);
    bring(a, u, address, slices, entry.x, tile, barrier, warp, lane);
    if (u.shrink)
        shrink(a, u, item.x, tile, (u16 *)parts, by_warp, barrier, warp, lane);
    else
        expand(a, u, item.x, item.w, scale_of(entry, u.p), slices, tile, parts, barrier, warp, lane);
}
