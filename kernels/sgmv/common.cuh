// What the segmented product's CUDA kernels share: loads, rounding, products of tensor cores, places in a slice.

#pragma once

using u16 = unsigned short;  // a bf16's bits
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int LANES = 32;

// Projections of a group: their widths, and how many there are before the others begin.
struct Group {
    int inputs, projections;
    int widths[3];  // 0: the group has no such projection
};

__device__ __forceinline__ int width_of(const Group &group, int p) {
    return p == 0 ? group.widths[0] : p == 1 ? group.widths[1] : group.widths[2];
}

// First column of projection p in y.
__device__ __forceinline__ int column_of(const Group &group, int p) {
    return (p > 0 ? group.widths[0] : 0) + (p > 1 ? group.widths[1] : 0);
}

// Elements from a slice's start to its row of A of projection p; `mask` has a bit for each that the adapter adapts.
__device__ __forceinline__ int start_of_A(const Group &group, int mask, int p) {
    return __popc(mask & ((1 << p) - 1)) * group.inputs;
}

// And to its row of B.
__device__ __forceinline__ int start_of_B(const Group &group, int mask, int p) {
    return __popc(mask & 7) * group.inputs + (p > 0 && (mask & 1) ? group.widths[0] : 0) +
           (p > 1 && (mask & 2) ? group.widths[1] : 0);
}

__device__ __forceinline__ float scale_of(int4 entry, int p) {
    return __int_as_float(p == 0 ? entry.y : p == 1 ? entry.z : entry.w);
}

// Programmatic dependent launch: the next kernel may start, and what this one reads of its predecessors is complete.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Weights are read once: they are the first to leave the L2 cache.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Eight elements that another kernel wrote, past the L1 cache; zeros where there are none.
__device__ __forceinline__ uint4 load_eight(const u16 *at, bool there) {
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(at), "r"((u32)there) : "memory");
    return v;
}

__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// What rounding a pair lost, rounded in turn: the two together are as good as fp32 beside rounding y.
__device__ __forceinline__ u32 round_rest(float low, float high, u32 rounded) {
    return round_pair(low - low_float(rounded), high - high_float(rounded));
}

// c (16, 8) += a (16, 16) b (16, 8). Lane 4g + j holds of a rows g and g + 8 (even and odd words), columns 2j, 2j + 1
// and, in the last two words, 2j + 8, 2j + 9; of b those rows of column g; of c columns 2j, 2j + 1 of row g, then g + 8.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
