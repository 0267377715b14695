// Eight numbers at a time: float32, bfloat16, exp and gelu.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef int64_t Word;
typedef float Vec __attribute__((vector_size(32)));  // 8 lanes; compilers split it where registers are narrower
typedef int32_t Int __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef uint16_t Half __attribute__((vector_size(16)));
constexpr int LANES = 8;

struct bf16 {
    uint16_t bits;
};

inline float get(float x) { return x; }
inline float get(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &wide, 4);
    return result;
}
inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    to.bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

inline float number(Word bits) {
    double wide;
    memcpy(&wide, &bits, 8);
    return float(wide);
}

inline Vec load(const float* from) {
    Vec result;
    memcpy(&result, from, 32);
    return result;
}
inline Vec load(const bf16* from) {
    Half narrow;
    memcpy(&narrow, from, 16);
    Int wide = __builtin_convertvector(narrow, Int) << 16;
    return (Vec)wide;
}
inline void store(float* to, Vec x) { memcpy(to, &x, 32); }
inline Bits rounded(Vec x) {  // to bfloat16, as `put` does
    Bits wide = (Bits)x;
    Bits narrow = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    return x == x ? narrow : Bits{} + 0x7fc0;
}
inline void store(bf16* to, Vec x) {
    Half narrow = __builtin_convertvector(rounded(x), Half);
    memcpy(to, &narrow, 16);
}
// a * b + c with one rounding, everywhere: a compiler that may choose chooses by the shape of a loop.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}
// In a register: a compiler may read a number from memory again for each product it is a factor of.
inline Vec kept(Vec x) {
#if defined(__GNUC__) && defined(__AVX__)
    asm("" : "+x"(x));
#endif
    return x;
}
inline Vec all(float x) { return Vec{x, x, x, x, x, x, x, x}; }
inline float sum(Vec x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// The sum of each of N vectors, in the order of `sum`. Eight at a time, halves of two are added in one instruction.
template <int N>
inline void sums(const Vec* x, float* to) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
    if constexpr (N == 8) {
        Vec four[4], two[2];
        for (int i = 0; i < 4; i++)
            four[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
                      __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        for (int i = 0; i < 2; i++)
            two[i] = __builtin_shufflevector(four[2 * i], four[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                     __builtin_shufflevector(four[2 * i], four[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
        store(to, __builtin_shufflevector(two[0], two[1], 0, 2, 8, 10, 4, 6, 12, 14) +
                      __builtin_shufflevector(two[0], two[1], 1, 3, 9, 11, 5, 7, 13, 15));
        return;
    }
#endif
#endif
    for (int i = 0; i < N; i++) to[i] = sum(x[i]);
}

inline Vec pick(Int where, Vec yes, Vec no) { return where ? yes : no; }

// e^x within 2 ulp; 0 below -87, infinity above 88.7, NaN stays.
inline Vec exp(Vec x) {
    Vec bounded = pick(x < all(-87.3f), all(-87.3f), pick(x > all(88.7f), all(88.7f), x));
    Vec scaled = bounded * all(1.44269504f);
    Int whole = __builtin_convertvector(scaled + pick(scaled < all(0), all(-0.5f), all(0.5f)), Int);
    Vec n = __builtin_convertvector(whole, Vec);
    Vec r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), bounded));
    Vec p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, all(c));
    p = fma(p * r, r, r) + all(1.0f);
    Int half = whole >> 1;  // 2^128 has no float: two factors
    Vec result = p * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
    result = pick(x < all(-87.3f), all(0), result);
    result = pick(x > all(88.7f), all(INFINITY), result);
    return pick(x == x, result, x);
}

// gelu with the tanh approximation: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu(Vec x) {
    Vec u = all(0.7978845608f) * (x + all(0.044715f) * x * x * x);
    return x / (all(1) + exp(all(-2) * u));
}

inline Vec tanh(Vec x) {
    Vec square = x * x, small = all(-5.70498872745e-3f);
    for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        small = fma(small, square, all(c));
    small = fma(small * square, x, x);  // near 0 the other form would lose digits
    Vec large = all(1) - all(2) / (exp(x + x) + all(1));
    return pick(square < all(0.390625f), small, large);
}

}  // namespace
