// Shaders that test the runtime: each does one thing, some do it wrong on purpose.

#include <metal_stdlib>
using namespace metal;

constant uint FC_mistake [[function_constant(0)]];
constant uint FC_twice = 2*FC_mistake;

// Every value passes through threadgroup memory to the thread opposite. Mistake 1: nobody waits.
kernel void reverse(
        device const float * source [[buffer(0)]],
        device float * target [[buffer(1)]],
        uint i [[thread_index_in_threadgroup]],
        uint3 group [[threadgroup_position_in_grid]],
        uint3 threads [[threads_per_threadgroup]]) {
    threadgroup float kept[128];
    kept[i] = source[group.x*threads.x + i];
    if (FC_mistake != 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    target[group.x*threads.x + i] = kept[threads.x - 1 - i];
}

// The same inside of a simdgroup, whose lanes are no more in step than threads are.
kernel void reverse_lanes(
        device const float * source [[buffer(0)]],
        device float * target [[buffer(1)]],
        threadgroup float * kept [[threadgroup(0)]],
        uint i [[thread_position_in_grid]],
        ushort lane [[thread_index_in_simdgroup]]) {
    kept[lane] = source[i];
    if (FC_mistake != 1) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    target[i] = kept[31 - lane];
}

// Mistakes that strict mode names: 1 a barrier in a branch, 2 a sum in a branch, 3 a thread that leaves, 4 a lane that does
// not exist, 5 a write behind threadgroup memory, 6 too much of it, 7 a barrier for no memory, 8 a read of what was never
// written.
kernel void mistakes(
        device float * target [[buffer(0)]],
        threadgroup float * memory [[threadgroup(0)]],
        uint i [[thread_index_in_threadgroup]],
        ushort lane [[thread_index_in_simdgroup]]) {
    memory[i] = (float) i;
    if (FC_mistake == 1 && i < 40) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    float x = 1.0f;
    if (FC_mistake == 2 && lane < 5) {
        x = simd_sum(x);
    }
    if (FC_mistake == 3 && i == 7) {
        return;
    }
    if (FC_mistake == 4) {
        x = simd_shuffle(x, (ushort) (lane + 1));
    }
    if (FC_mistake == 5 && i == 3) {
        memory[64] = 1.0f;
    }
    if (FC_mistake == 7) {
        threadgroup_barrier(mem_flags::mem_none);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    target[i] = simd_sum(x) + (FC_mistake == 8 ? memory[i + 64] : memory[63 - i]) - FC_twice + 2*FC_mistake;
}

// The language: vectors, halves, conversions, swizzles, shuffles. Results in order.
kernel void language(device float * target [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    float4 v = float4(1.0f, 2.0f, 3.0f, 4.0f);
    v.xy = v.yx;
    v.zw *= 2.0f;
    const half h = 2049.0h; // not a half: 2048
    const half sum = 1.0h + 0.0004h;
    const uchar4 bytes = uchar4(int4(-1, 256, 2, 3));
    const float3 w = float3(v.xy, 0.5);
    float down = simd_shuffle_down((float) i, 1), up = simd_shuffle_up((float) i, 2);
    const float other = simd_shuffle_xor((float) i, 5), all = simd_sum((float) i), most = simd_max((float) i);
    const uint before = simd_prefix_exclusive_sum(1u);
    device float * t = target + 20*i;
    t[0] = v.x;
    t[1] = v.y;
    t[2] = v.z;
    t[3] = v.w;
    t[4] = h;
    t[5] = sum;
    t[6] = bytes.x;
    t[7] = bytes.y;
    t[8] = dot(w, w.zyx);
    t[9] = down;
    t[10] = up;
    t[11] = other;
    t[12] = all;
    t[13] = most;
    t[14] = before;
    t[15] = as_type<float>(0x40490fdbu);
    t[16] = any(v > 7.0f) ? 1.0f : 0.0f;
    t[17] = (float) (half) 65520.0f;
    t[18] = fma(h, 1.0h, 1.0h);
    t[19] = 1.0/3;
}
