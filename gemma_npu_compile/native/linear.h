// y = x w^T for few rows: bound by reading w, once.
#pragma once

#include "threads.h"

namespace {

template <int MB, int NB, class T>
inline void tile(const float* x, int64_t ldx, const T* const* w, int64_t k, float (*result)[NB]) {
    Vec acc[MB][NB] = {};
    for (int64_t i = 0; i < k; i += LANES) {
        Vec wide[NB];
        for (int b = 0; b < NB; b++) wide[b] = load(w[b] + i);
        for (int a = 0; a < MB; a++) {
            Vec left = load(x + a * ldx + i);
            for (int b = 0; b < NB; b++) acc[a][b] = fma(left, wide[b], acc[a][b]);
        }
    }
    for (int a = 0; a < MB; a++)
        for (int b = 0; b < NB; b++) result[a][b] = sum(acc[a][b]);
}

template <int MB, int NB, class T>
inline void product(const float* x, int64_t k, const T* const* w, T* y, int64_t ldy, int64_t n) {
    float result[MB][NB];
    tile<MB, NB>(x, k, w, k, result);
    for (int a = 0; a < MB; a++)
        for (int b = 0; b < NB; b++) put(y[a * ldy + n + b], result[a][b]);
}

template <int NB, class T>
void columns(const float* x, int64_t m, int64_t k, const T* w, T* y, int64_t ldy, int64_t n) {
    const T* rows[NB];
    for (int b = 0; b < NB; b++) rows[b] = w + (n + b) * k;
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) product<4, NB>(x + i * k, k, rows, y + i * ldy, ldy, n);
    for (; i + 2 <= m; i += 2) product<2, NB>(x + i * k, k, rows, y + i * ldy, ldy, n);
    for (; i < m; i++) product<1, NB>(x + i * k, k, rows, y + i * ldy, ldy, n);
}

// y (m, n), x (m, k) with row strides; w (n, k) contiguous; k a multiple of 8.
template <class T>
void linear(const Word* a, Shared&, int t, int n) {
    T* y = (T*)a[0];
    const T *x = (const T*)a[1], *w = (const T*)a[2];
    int64_t m = a[3], width = a[4], k = a[5], ldy = a[6], ldx = a[7];
    Share mine(width, t, n, 4);
    float* wide = own(m * k);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < k; j += LANES) store(wide + i * k + j, load(x + i * ldx + j));
    int64_t j = mine.begin;
    if (m >= 4) {
        for (; j + 2 <= mine.end; j += 2) columns<2>(wide, m, k, w, y, ldy, j);
    } else {
        for (; j + 4 <= mine.end; j += 4) columns<4>(wide, m, k, w, y, ldy, j);
    }
    for (; j < mine.end; j++) columns<1>(wide, m, k, w, y, ldy, j);
}

}  // namespace
