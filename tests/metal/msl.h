// The Metal Shading Language as C++17: what a translated shader is compiled with.
//
// Any compiler will do: half is the compiler's where it has one, otherwise a class that rounds after every operation, as
// bfloat is, and the translator turns `v.zyx` into `v.swizzle<2, 1, 0>()`. The class is enough for shaders that do not
// mix half and float in `?:` nor keep halves in nameless structs. Scalar functions are overloads, not templates, so
// that a call with mixed types is ambiguous here as it is in Metal.
//
// Not modelled: address spaces (the lint looks at them), fast math, the accuracy of Metal's own exp and log, flushed
// denormals, and the order in which a real simdgroup sums.

#pragma once

#include "runtime.h"

#include <cfloat>
#include <climits>
#include <cstring>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define MSL_HERE const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define MSL_SITE(op) (::msl::Site{ file_, line_, op })

namespace msl {

template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type between different sizes");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return bits<float>(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = (float) mantissa*0x1p-24f;
    return sign ? -small : small;
#endif
}

inline uint16_t float_to_half(float f) {
#if defined(__F16C__)
    return _cvtss_sh(f, 0);
#else
    const uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00;
    if (rest < 0x38800000) { // denormal: let the float unit round
        return sign | (uint16_t) (bits<uint32_t>(bits<float>(rest) + 0.5f) - bits<uint32_t>(0.5f));
    }
    return sign | (uint16_t) ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13);
#endif
}

inline float bfloat_to_float(uint16_t b) {
    return bits<float>((uint32_t) b << 16);
}

inline uint16_t float_to_bfloat(float f) {
    const uint32_t u = bits<uint32_t>(f);
    return f != f ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// A 16-bit float: with its like and with integers it stays one, with a float it becomes a float.
template <float (*WIDEN)(uint16_t), uint16_t (*NARROW)(float)> struct Short {
    uint16_t stored;

    Short() = default;
    template <class S, std::enable_if_t<std::is_arithmetic<S>::value, int> = 0> Short(S s) : stored(NARROW((float) s)) {}
    operator float() const { return WIDEN(stored); }

    template <class S> using IfInteger = std::enable_if_t<std::is_integral<S>::value, int>;
#define MSL_SHORT_OP(op) \
    friend Short operator op(Short a, Short b) { return Short((float) a op (float) b); } \
    friend float operator op(Short a, float b) { return (float) a op b; } \
    friend float operator op(float a, Short b) { return a op (float) b; } \
    template <class S, IfInteger<S> = 0> friend Short operator op(Short a, S b) { return a op Short(b); } \
    template <class S, IfInteger<S> = 0> friend Short operator op(S a, Short b) { return Short(a) op b; } \
    template <class S> Short & operator op##=(S b) { return *this = Short((float) (*this op b)); }
    MSL_SHORT_OP(+) MSL_SHORT_OP(-) MSL_SHORT_OP(*) MSL_SHORT_OP(/)
#undef MSL_SHORT_OP
    Short operator-() const { return Short(-(float) *this); }
};

template <class T> struct IsScalar : std::is_arithmetic<T> {};
template <float (*W)(uint16_t), uint16_t (*N)(float)> struct IsScalar<Short<W, N>> : std::true_type {};

// Arguments of a kernel, as what its parameters are.
struct Buffer {
    void * at;
    template <class T> operator T *() const { return (T *) at; }
    template <class T> operator T &() const { return *(T *) at; }
};
struct Position {
    const uint32_t * at;
    operator uint32_t() const { return at[0]; }
    template <class V, class = typename V::Element> operator V() const {
        V v;
        for (int i = 0; i < V::SIZE; ++i) v[i] = (typename V::Element) at[i];
        return v;
    }
};

template <class T> void set_constant(void * at, double value) {
    *(T *) at = (T) value;
}

template <class T> T & shared(int declaration) {
    return *(T *) shared_storage(declaration, sizeof(T));
}

} // namespace msl

#if defined(__FLT16_MANT_DIG__)
typedef _Float16 half;
namespace msl {
template <> struct IsScalar<half> : std::true_type {};
} // namespace msl
#else
typedef msl::Short<msl::half_to_float, msl::float_to_half> half;
#endif
typedef msl::Short<msl::bfloat_to_float, msl::float_to_bfloat> bfloat;

template <class To, class From> inline To as_type(From from) {
    return msl::bits<To>(from);
}

namespace metal {

// Vectors. Three take the room of four, as in Metal.

template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;

template <class T, int N> struct VecStore;
template <class T> struct alignas(2*sizeof(T)) VecStore<T, 2> {
    union {
        T v[2];
        struct { T x, y; };
        struct { T r, g; };
    };
};
template <class T> struct alignas(4*sizeof(T)) VecStore<T, 3> {
    union {
        T v[3];
        struct { T x, y, z; };
        struct { T r, g, b; };
    };
};
template <class T> struct alignas(4*sizeof(T)) VecStore<T, 4> {
    union {
        T v[4];
        struct { T x, y, z, w; };
        struct { T r, g, b, a; };
    };
};

template <class T, int N, int... I> struct SwizzleRef {
    vec<T, N> & to;
    typedef vec<T, sizeof...(I)> Value;
    SwizzleRef & operator=(Value from) {
        int k = 0;
        ((to.v[I] = from.v[k++]), ...);
        return *this;
    }
    SwizzleRef & operator+=(Value b) { return *this = Value{ to.v[I]... } + b; }
    SwizzleRef & operator-=(Value b) { return *this = Value{ to.v[I]... } - b; }
    SwizzleRef & operator*=(Value b) { return *this = Value{ to.v[I]... }*b; }
    SwizzleRef & operator/=(Value b) { return *this = Value{ to.v[I]... }/b; }
};

template <class T> using IfScalar = std::enable_if_t<msl::IsScalar<T>::value, int>;

template <class T, int N> struct vec : VecStore<T, N> {
    typedef T Element;
    enum { SIZE = N };
    using VecStore<T, N>::v;

    vec() = default;
    template <class S, IfScalar<S> = 0> vec(S s) {
        for (int i = 0; i < N; ++i) v[i] = (T) s;
    }
    template <class U, std::enable_if_t<!std::is_same<U, T>::value, int> = 0> explicit vec(const vec<U, N> & o) {
        for (int i = 0; i < N; ++i) v[i] = (T) o.v[i];
    }
    template <class U, std::enable_if_t<!std::is_same<U, T>::value, int> = 0> explicit vec(const packed_vec<U, N> & o) {
        for (int i = 0; i < N; ++i) v[i] = (T) o.v[i];
    }
    // From parts: scalars and shorter vectors that make N together.
    template <class A, class B, class... C> vec(const A & a, const B & b, const C &... c) {
        int n = 0;
        put(n, a);
        put(n, b);
        (put(n, c), ...);
    }

    T & operator[](int i) { return v[i]; }
    const T & operator[](int i) const { return v[i]; }
    template <int... I> vec<T, sizeof...(I)> swizzle() const { return vec<T, sizeof...(I)>(v[I]...); }
    template <int... I> SwizzleRef<T, N, I...> swizzle_ref() { return { *this }; }

#define MSL_VEC_OP(op) \
    friend vec operator op(vec a, vec b) { \
        vec r; \
        for (int i = 0; i < N; ++i) r.v[i] = (T) (a.v[i] op b.v[i]); \
        return r; \
    } \
    friend vec & operator op##=(vec & a, vec b) { return a = a op b; }
    MSL_VEC_OP(+) MSL_VEC_OP(-) MSL_VEC_OP(*) MSL_VEC_OP(/) MSL_VEC_OP(%)
    MSL_VEC_OP(&) MSL_VEC_OP(|) MSL_VEC_OP(^) MSL_VEC_OP(<<) MSL_VEC_OP(>>)
#undef MSL_VEC_OP
#define MSL_VEC_COMPARE(op) \
    friend vec<bool, N> operator op(vec a, vec b) { \
        vec<bool, N> r; \
        for (int i = 0; i < N; ++i) r.v[i] = a.v[i] op b.v[i]; \
        return r; \
    }
    MSL_VEC_COMPARE(<) MSL_VEC_COMPARE(<=) MSL_VEC_COMPARE(>) MSL_VEC_COMPARE(>=) MSL_VEC_COMPARE(==) MSL_VEC_COMPARE(!=)
#undef MSL_VEC_COMPARE
    vec operator-() const {
        vec r;
        for (int i = 0; i < N; ++i) r.v[i] = (T) -v[i];
        return r;
    }

  private:
    template <class S, IfScalar<S> = 0> void put(int & n, S s) { v[n++] = (T) s; }
    template <int M> void put(int & n, const vec<T, M> & part) {
        for (int i = 0; i < M; ++i) v[n++] = part.v[i];
    }
};

// Aligned as their elements.
template <class T, int N> struct packed_vec {
    T v[N];
    packed_vec() = default;
    packed_vec(vec<T, N> o) { memcpy(v, o.v, sizeof v); }
    operator vec<T, N>() const {
        vec<T, N> r;
        memcpy(r.v, v, sizeof v);
        return r;
    }
    T & operator[](int i) { return v[i]; }
    const T & operator[](int i) const { return v[i]; }
};

#define MSL_VEC_TYPES(t) \
    typedef vec<t, 2> t##2; \
    typedef vec<t, 3> t##3; \
    typedef vec<t, 4> t##4; \
    typedef packed_vec<t, 2> packed_##t##2; \
    typedef packed_vec<t, 3> packed_##t##3; \
    typedef packed_vec<t, 4> packed_##t##4;
MSL_VEC_TYPES(bool) MSL_VEC_TYPES(char) MSL_VEC_TYPES(uchar) MSL_VEC_TYPES(short) MSL_VEC_TYPES(ushort)
MSL_VEC_TYPES(int) MSL_VEC_TYPES(uint) MSL_VEC_TYPES(long) MSL_VEC_TYPES(ulong)
MSL_VEC_TYPES(half) MSL_VEC_TYPES(bfloat) MSL_VEC_TYPES(float)
#undef MSL_VEC_TYPES

// C columns of R rows.
template <class T, int C, int R> struct matrix {
    vec<T, R> columns[C];
    vec<T, R> & operator[](int c) { return columns[c]; }
    const vec<T, R> & operator[](int c) const { return columns[c]; }
    matrix() = default;
    matrix(T diagonal) {
        for (int c = 0; c < C; ++c) {
            for (int r = 0; r < R; ++r) columns[c][r] = c == r ? diagonal : T(0);
        }
    }
    template <class U, std::enable_if_t<!std::is_same<U, T>::value, int> = 0> explicit matrix(const matrix<U, C, R> & o) {
        for (int c = 0; c < C; ++c) columns[c] = vec<T, R>(o.columns[c]);
    }
};
#define MSL_MATRIX_TYPES(t) \
    typedef matrix<t, 2, 2> t##2x2; \
    typedef matrix<t, 2, 4> t##2x4; \
    typedef matrix<t, 3, 3> t##3x3; \
    typedef matrix<t, 4, 2> t##4x2; \
    typedef matrix<t, 4, 4> t##4x4;
MSL_MATRIX_TYPES(float) MSL_MATRIX_TYPES(half)
#undef MSL_MATRIX_TYPES

// Type traits and limits.

using std::conditional;
using std::conditional_t;
using std::enable_if_t;
using std::is_same;
template <class A, class B> constexpr bool is_same_v = std::is_same<A, B>::value;
using std::remove_const_t;
using std::remove_cv_t;

template <class T> struct numeric_limits {
    static constexpr T max() { return std::is_signed<T>::value ? (T) ~((T) 1 << (8*sizeof(T) - 1)) : (T) -1; }
    static constexpr T min() { return std::is_signed<T>::value ? (T) ((T) 1 << (8*sizeof(T) - 1)) : (T) 0; }
    static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<float> {
    static constexpr float max() { return FLT_MAX; }
    static constexpr float min() { return FLT_MIN; }
    static constexpr float lowest() { return -FLT_MAX; }
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float epsilon() { return FLT_EPSILON; }
};

// Mathematics. Halves go through floats and are rounded once.

#define MSL_MATH_1(name, expression) \
    inline float name(float x) { return expression; } \
    inline half name(half h) { \
        const float x = h; \
        return half(expression); \
    } \
    inline bfloat name(bfloat h) { \
        const float x = h; \
        return bfloat(expression); \
    } \
    template <class T, int N> inline vec<T, N> name(vec<T, N> a) { \
        vec<T, N> r; \
        for (int i = 0; i < N; ++i) r.v[i] = name(a.v[i]); \
        return r; \
    }
#define MSL_MATH_2(name, expression) \
    inline float name(float x, float y) { return expression; } \
    inline half name(half a, half b) { \
        const float x = a, y = b; \
        return half(expression); \
    } \
    template <class T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
        vec<T, N> r; \
        for (int i = 0; i < N; ++i) r.v[i] = name(a.v[i], b.v[i]); \
        return r; \
    }
#define MSL_MATH \
    MSL_MATH_1(exp, __builtin_expf(x)) \
    MSL_MATH_1(exp2, __builtin_exp2f(x)) \
    MSL_MATH_1(log, __builtin_logf(x)) \
    MSL_MATH_1(log2, __builtin_log2f(x)) \
    MSL_MATH_1(sqrt, __builtin_sqrtf(x)) \
    MSL_MATH_1(rsqrt, 1.0f/__builtin_sqrtf(x)) \
    MSL_MATH_1(sin, __builtin_sinf(x)) \
    MSL_MATH_1(cos, __builtin_cosf(x)) \
    MSL_MATH_1(tanh, __builtin_tanhf(x)) \
    MSL_MATH_1(fabs, __builtin_fabsf(x)) \
    MSL_MATH_1(floor, __builtin_floorf(x)) \
    MSL_MATH_1(ceil, __builtin_ceilf(x)) \
    MSL_MATH_1(trunc, __builtin_truncf(x)) \
    MSL_MATH_1(rint, __builtin_rintf(x)) \
    MSL_MATH_1(round, __builtin_roundf(x)) \
    MSL_MATH_2(pow, __builtin_powf(x, y)) \
    MSL_MATH_2(powr, __builtin_powf(x, y)) \
    MSL_MATH_2(fmod, __builtin_fmodf(x, y)) \
    MSL_MATH_2(fmin, __builtin_fminf(x, y)) \
    MSL_MATH_2(fmax, __builtin_fmaxf(x, y)) \
    MSL_MATH_2(copysign, __builtin_copysignf(x, y))
MSL_MATH
namespace precise {
MSL_MATH
}
namespace fast {
MSL_MATH
}
#undef MSL_MATH
#undef MSL_MATH_1
#undef MSL_MATH_2

inline float fma(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
inline half fma(half a, half b, half c) {
    return half((float) __builtin_fma((double) (float) a, (double) (float) b, (double) (float) c));
}
template <class T, int N> inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
    return r;
}

inline bool isnan(float x) {
    return __builtin_isnan(x);
}
inline bool isinf(float x) {
    return __builtin_isinf(x);
}
inline bool isfinite(float x) {
    return __builtin_isfinite(x);
}

#define MSL_ORDERED(t) \
    inline t min(t a, t b) { return b < a ? b : a; } \
    inline t max(t a, t b) { return a < b ? b : a; } \
    inline t clamp(t x, t low, t high) { return min(max(x, low), high); } \
    inline t select(t a, t b, bool c) { return c ? b : a; } \
    inline t abs(t a) { return a < t(0) ? (t) -a : a; }
MSL_ORDERED(int8_t) MSL_ORDERED(uchar) MSL_ORDERED(short) MSL_ORDERED(ushort) MSL_ORDERED(int) MSL_ORDERED(uint)
MSL_ORDERED(long) MSL_ORDERED(ulong) MSL_ORDERED(half) MSL_ORDERED(bfloat) MSL_ORDERED(float)
#undef MSL_ORDERED

#define MSL_EACH_2(name) \
    template <class T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
        vec<T, N> r; \
        for (int i = 0; i < N; ++i) r.v[i] = name(a.v[i], b.v[i]); \
        return r; \
    } \
    template <class T, int N, class S, IfScalar<S> = 0> inline vec<T, N> name(vec<T, N> a, S b) { \
        return name(a, vec<T, N>(b)); \
    }
MSL_EACH_2(min) MSL_EACH_2(max)
#undef MSL_EACH_2
template <class T, int N> inline vec<T, N> abs(vec<T, N> a) {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = abs(a.v[i]);
    return r;
}
template <class T, int N> inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
    return min(max(x, low), high);
}
template <class T, int N, class S, IfScalar<S> = 0> inline vec<T, N> clamp(vec<T, N> x, S low, S high) {
    return min(max(x, low), high);
}
template <class T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = c.v[i] ? b.v[i] : a.v[i];
    return r;
}
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
    T sum = a.v[0]*b.v[0];
    for (int i = 1; i < N; ++i) sum = sum + a.v[i]*b.v[i];
    return sum;
}
template <int N> inline bool any(vec<bool, N> a) {
    for (int i = 0; i < N; ++i) {
        if (a.v[i]) return true;
    }
    return false;
}
template <int N> inline bool all(vec<bool, N> a) {
    for (int i = 0; i < N; ++i) {
        if (!a.v[i]) return false;
    }
    return true;
}

inline uint popcount(uint x) {
    return __builtin_popcount(x);
}
inline uint clz(uint x) {
    return x ? __builtin_clz(x) : 32;
}
inline uint ctz(uint x) {
    return x ? __builtin_ctz(x) : 32;
}
inline uint reverse_bits(uint x) {
    uint r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
    return r;
}

// Where threads meet.

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
    return (mem_flags) ((int) a | (int) b);
}

inline void threadgroup_barrier(mem_flags flags, MSL_HERE) {
    // Without memory in its flags it orders none, whatever happens on this machine.
    if (flags == mem_flags::mem_none) ::msl::undefined("a barrier that orders no memory", MSL_SITE(1));
    ::msl::wait(::msl::Wait::GroupBarrier, MSL_SITE(1));
}
inline void simdgroup_barrier(mem_flags flags, MSL_HERE) {
    if (flags == mem_flags::mem_none) ::msl::undefined("a barrier that orders no memory", MSL_SITE(2));
    ::msl::wait(::msl::Wait::SimdBarrier, MSL_SITE(2));
}

template <class T> inline T msl_lane(const ::msl::Exchange & e, uint lane, ::msl::Site site) {
    if (lane >= ::msl::LANES || !(e.active >> lane & 1)) {
        ::msl::undefined("the value of a lane that is not there", site);
        lane %= ::msl::LANES;
    }
    T t;
    memcpy(&t, e.values[lane], sizeof t);
    return t;
}

#define MSL_SHUFFLE(name, number, from) \
    template <class T, class I> inline T name(T value, I n, MSL_HERE) { \
        static_assert(sizeof(T) <= ::msl::SLOT_BYTES, "too large for a lane"); \
        uint lane; \
        const auto & e = ::msl::exchange(&value, sizeof value, MSL_SITE(number), lane); \
        return msl_lane<T>(e, (uint) (from), MSL_SITE(number)); \
    }
MSL_SHUFFLE(simd_shuffle, 10, n)
MSL_SHUFFLE(simd_broadcast, 11, n)
MSL_SHUFFLE(simd_shuffle_xor, 12, lane ^ (uint) n)
// The lanes at the end keep their own value.
MSL_SHUFFLE(simd_shuffle_down, 13, lane + (uint) n < ::msl::LANES ? lane + (uint) n : lane)
MSL_SHUFFLE(simd_shuffle_up, 14, lane >= (uint) n ? lane - (uint) n : lane)
#undef MSL_SHUFFLE

#define MSL_REDUCE(name, number, expression) \
    template <class T> inline T name(T value, MSL_HERE) { \
        uint lane; \
        const auto & e = ::msl::exchange(&value, sizeof value, MSL_SITE(number), lane); \
        T a = T(0); \
        bool first = true; \
        for (uint i = 0; i < ::msl::LANES; ++i) { \
            if (!(e.active >> i & 1)) continue; \
            const T b = msl_lane<T>(e, i, MSL_SITE(number)); \
            a = first ? b : T(expression); \
            first = false; \
        } \
        return a; \
    }
MSL_REDUCE(simd_sum, 20, a + b)
MSL_REDUCE(simd_product, 21, a*b)
MSL_REDUCE(simd_max, 22, max(a, b))
MSL_REDUCE(simd_min, 23, min(a, b))
MSL_REDUCE(simd_or, 24, a | b)
MSL_REDUCE(simd_and, 25, a & b)
#undef MSL_REDUCE
inline bool simd_any(bool value, MSL_HERE) {
    return simd_max((uint) value, file_, line_) != 0;
}
inline bool simd_all(bool value, MSL_HERE) {
    return simd_min((uint) value, file_, line_) != 0;
}
template <class T> inline T simd_prefix_exclusive_sum(T value, MSL_HERE) {
    uint lane;
    const auto & e = ::msl::exchange(&value, sizeof value, MSL_SITE(26), lane);
    T sum = T(0);
    for (uint i = 0; i < lane; ++i) {
        if (e.active >> i & 1) sum = sum + msl_lane<T>(e, i, MSL_SITE(26));
    }
    return sum;
}

// 8x8 matrices that a simdgroup holds together, two elements in each lane; which ones is nobody's business. Loads and stores
// touch memory without meeting anybody: who wrote it must have been waited for.

template <class T, int R, int C> struct simdgroup_matrix {
    static_assert(R == 8 && C == 8, "simdgroup matrices are 8x8");
    T elements[2];
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal) {
        const uint lane = ::msl::lane();
        for (uint i = 0; i < 2; ++i) elements[i] = row(lane) == column(lane, i) ? diagonal : T(0);
    }
    static uint row(uint lane) { return lane/4; }
    static uint column(uint lane, uint i) { return lane % 4*2 + i; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;

template <class T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, R, C> m;
    m.elements[0] = m.elements[1] = value;
    return m;
}

template <class T> inline ulong msl_matrix_place(uint i, ulong stride, ulong2 origin, bool transposed) {
    typedef simdgroup_matrix<T, 8, 8> M;
    const uint lane = ::msl::lane(), r = M::row(lane), c = M::column(lane, i);
    return ((transposed ? c : r) + origin.y)*stride + (transposed ? r : c) + origin.x;
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8> & m, const T * from, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false) {
    for (uint i = 0; i < 2; ++i) m.elements[i] = from[msl_matrix_place<T>(i, stride, origin, transposed)];
}
template <class T>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8> & m, T * to, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false) {
    for (uint i = 0; i < 2; ++i) to[msl_matrix_place<T>(i, stride, origin, transposed)] = m.elements[i];
}

// d = a b + c, sums in floats.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b, const simdgroup_matrix<C, 8, 8> & c, MSL_HERE) {
    typedef simdgroup_matrix<float, 8, 8> M;
    const float4 mine = float4((float) a.elements[0], (float) a.elements[1], (float) b.elements[0], (float) b.elements[1]);
    uint lane;
    const auto & e = ::msl::exchange(&mine, sizeof mine, MSL_SITE(30), lane);
    float4 all[::msl::LANES];
    for (uint i = 0; i < ::msl::LANES; ++i) all[i] = msl_lane<float4>(e, i, MSL_SITE(30));
    for (uint i = 0; i < 2; ++i) {
        float sum = (float) c.elements[i];
        for (uint k = 0; k < 8; ++k) {
            // Element (row, k) of a and (k, column) of b.
            const uint column = M::column(lane, i);
            sum += all[M::row(lane)*4 + k/2].v[k % 2]*all[k*4 + column/2].v[2 + column % 2];
        }
        d.elements[i] = (D) sum;
    }
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b, MSL_HERE) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), file_, line_);
}

} // namespace metal

using namespace metal;

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXHALF half(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
