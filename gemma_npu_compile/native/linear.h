// y = x w^T for few rows: bound by reading w, once.
#pragma once

#include "threads.h"

namespace {

// Rows of x as a product reads them. `load_pair` takes 16 numbers of a weight as they come cheapest: bfloat16 as the
// eight even ones and the eight odd ones, two bit operations and no shuffle. x is laid out the same way.
inline void load_pair(const float* from, Vec& first, Vec& second) {
    first = load(from);
    second = load(from + LANES);
}
inline void load_pair(const bf16* from, Vec& first, Vec& second) {
    Int both;
    memcpy(&both, from, 32);
    first = (Vec)(both << 16);
    second = (Vec)(both & int32_t(0xffff0000));
}
inline void store_pair(float* to, Vec first, Vec second) {
    store(to, first);
    store(to + LANES, second);
}
inline void store_pair(bf16* to, Vec first, Vec second) {
    Bits both = rounded(first) | rounded(second) << 16;
    memcpy(to, &both, 32);
}
template <class T>
inline void spread(const T* from, int64_t k, float* to, float factor = 1) {
    int64_t i = 0;
    for (; i + 2 * LANES <= k; i += 2 * LANES) {
        Vec first, second;
        load_pair(from + i, first, second);
        store(to + i, first * all(factor));
        store(to + i + LANES, second * all(factor));
    }
    if (i < k) store(to + i, load(from + i) * all(factor));
}

// MB spread rows of x times NB rows w; memory of the rows `next` is asked for meanwhile. k is a multiple of 8.
template <int MB, int NB, class T>
inline void tile(const float* x, int64_t ldx, const T* const* w, const T* const* next, int64_t k, float* result) {
    Vec acc[MB * NB] = {}, wide[NB];
    int64_t i = 0;
    auto step = [&](int64_t at) {
        for (int a = 0; a < MB; a++) {
            Vec left = kept(load(x + a * ldx + at));
            for (int b = 0; b < NB; b++) acc[a * NB + b] = fma(left, wide[b], acc[a * NB + b]);
        }
    };
    for (; i + 2 * LANES <= k; i += 2 * LANES) {
        Vec odd[NB];
        for (int b = 0; b < NB; b++) {
            __builtin_prefetch(next[b] + i);
            load_pair(w[b] + i, wide[b], odd[b]);
        }
        step(i);
        for (int b = 0; b < NB; b++) wide[b] = odd[b];
        step(i + LANES);
    }
    if (i < k) {
        for (int b = 0; b < NB; b++) wide[b] = load(w[b] + i);
        step(i);
    }
    sums<MB * NB>(acc, result);
}

constexpr int64_t AHEAD = 2048;  // bytes between what is read of a stream and what is asked for

template <class T>
inline const T* ahead(const T* row) {
    return (const T*)((const char*)row + AHEAD);
}

// MB rows of x times NB rows of w, `apart` columns from each other.
template <int MB, int NB, class T>
inline void product(const float* x, int64_t k, const T* w, int64_t apart, T* y, int64_t ldy) {
    const T *rows[NB], *next[NB];
    for (int b = 0; b < NB; b++) {
        rows[b] = w + b * apart * k;
        next[b] = ahead(rows[b]);
    }
    float result[MB * NB];
    tile<MB, NB>(x, k, rows, next, k, result);
    for (int a = 0; a < MB; a++)
        for (int b = 0; b < NB; b++) put(y[a * ldy + b * apart], result[a * NB + b]);
}

// All rows of x times NB rows of w.
template <int NB, class T>
void columns(const float* x, int64_t m, int64_t k, const T* w, int64_t apart, T* y, int64_t ldy) {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) product<4, NB>(x + i * k, k, w, apart, y + i * ldy, ldy);
    if (m - i == 3) product<3, NB>(x + i * k, k, w, apart, y + i * ldy, ldy);
    if (m - i == 2) product<2, NB>(x + i * k, k, w, apart, y + i * ldy, ldy);
    if (m - i == 1) product<1, NB>(x + i * k, k, w, apart, y + i * ldy, ldy);
}

// y (m, n), x (m, k) with row strides; w (n, k) contiguous; k a multiple of 8. The weight is read as two streams, each
// from its first byte to its last: neighbouring rows read side by side would be two that stop and jump at every row,
// which processors do not foresee.
template <class T>
void linear(const Word* a, Shared&, Units units) {
    T* y = (T*)a[0];
    const T *x = (const T*)a[1], *w = (const T*)a[2];
    int64_t m = a[3], width = a[4], k = a[5], ldy = a[6], ldx = a[7];
    Share mine(width, units, 8);
    float* wide = own(m * k);
    for (int64_t i = 0; i < m; i++) spread(x + i * ldx, k, wide + i * k);
    const int64_t half = (mine.end - mine.begin) / 2;
    int64_t j = mine.begin;
    for (; j < mine.begin + half; j++) columns<2>(wide, m, k, w + j * k, half, y + j, ldy);
    if (j += half; j < mine.end) columns<1>(wide, m, k, w + j * k, 0, y + j, ldy);
}

}  // namespace
