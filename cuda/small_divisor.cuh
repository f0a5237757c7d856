// Division by a number that is known before a launch. One of two integers is some twenty instructions, each of which comes from memory
// when a kernel is met for the first time, and several follow each other before a block knows where its rows are.
#pragma once

namespace kv {

// Of numbers whose product with it is below 2^31.
struct small_divisor {
    unsigned by, factor; // 2^31/by, rounded up

    static small_divisor of(unsigned by) {
        return { by, (unsigned) ((0x80000000ull + by - 1)/by) };
    }

    __device__ __forceinline__ unsigned quotient(unsigned x) const {
        return (unsigned) ((unsigned long long) (2*x)*factor >> 32);
    }

    __device__ __forceinline__ unsigned rest(unsigned x) const {
        return x - quotient(x)*by;
    }
};

}  // namespace kv
