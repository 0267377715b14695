// Row by row: norms, rotary embedding, gated GELU.
#pragma once

#include "threads.h"

namespace {

template <class T, class W>
void norm_row(T* out, const T* x, const W* weight, int64_t width, float eps) {
    Vec squares = all(0);
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        Vec v = load(x + j);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; j < width; j++) total += get(x[j]) * get(x[j]);
    float scale = 1.0f / std::sqrt(total / float(width) + eps);
    for (j = 0; j + LANES <= width; j += LANES) {
        Vec v = load(x + j) * all(scale);
        store(out + j, weight ? v * load(weight + j) : v);
    }
    for (; j < width; j++) put(out[j], get(x[j]) * scale * (weight ? get(weight[j]) : 1.0f));
}

// out (count, width) contiguous; x rows; weight (width) or none; eps
template <class T, class W>
void rms_norm(const Word* a, Shared&, Units units) {
    T* out = (T*)a[0];
    Rows<const T> x{(const T*)a[1], a + 6, a + 9};
    Share mine(a[3], units);
    for (int64_t i = mine.begin; i < mine.end; i++)
        norm_row(out + i * a[4], x[i], (const W*)a[2], a[4], number(a[5]));
}

// normed, total (count, width) contiguous; x, residual rows of one shape; weight or none; eps
template <class T, class W>
void add_rms_norm(const Word* a, Shared&, Units units) {
    T *normed = (T*)a[0], *total = (T*)a[1];
    Rows<const T> x{(const T*)a[2], a + 8, a + 11}, residual{(const T*)a[3], a + 8, a + 14};
    int64_t width = a[6];
    Share mine(a[5], units);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const T *left = x[i], *right = residual[i];
        T* row = total + i * width;
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) store(row + j, load(left + j) + load(right + j));
        for (; j < width; j++) put(row[j], get(left[j]) + get(right[j]));
        norm_row(normed + i * width, row, (const W*)a[4], width, number(a[7]));
    }
}

// out (tokens, heads, width) contiguous; x rows (.., heads); cos, sin (tokens, width) rows of one layout
template <class T, class C>
void rotary(const Word* a, Shared&, Units units) {
    T* out = (T*)a[0];
    Rows<const T> x{(const T*)a[1], a + 7, a + 10};
    Rows<const C> cos{(const C*)a[2], a + 13, a + 16}, sin{(const C*)a[3], a + 13, a + 19};
    int64_t heads = a[5], width = a[6], half = width / 2;
    Share mine(a[4] * heads, units);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const T* row = x[i];
        const C *c = cos[i / heads], *s = sin[i / heads];
        T* to = out + i * width;
        for (int64_t j = 0; j < half; j += LANES) {
            Vec left = load(row + j), right = load(row + half + j);
            store(to + j, left * load(c + j) - right * load(s + j));
            store(to + half + j, right * load(c + half + j) + left * load(s + half + j));
        }
    }
}

// out (count, width) contiguous; gate and up rows of one shape, whole vectors
template <class T>
void gelu_mul(const Word* a, Shared&, Units units) {
    T* out = (T*)a[0];
    Rows<const T> gate{(const T*)a[1], a + 5, a + 8}, up{(const T*)a[2], a + 5, a + 11};
    const int64_t width = a[4];
    parts(a[3], width, units, [&](int64_t i, int64_t begin, int64_t end) {
        const T *left = gate[i], *right = up[i];
        for (int64_t j = begin; j < end; j += LANES) store(out + i * width + j, gelu(load(left + j)) * load(right + j));
    });
}

// sin(x + quarters * pi / 2) of a float, in double: right to the last bit or two for positions of any context.
inline float sine(float x, int quarters) {
    if (!std::isfinite(x)) return NAN;
    double turns = std::nearbyint(x * 0.6366197723675814);
    double r = x - turns * 1.5707963267948966 - turns * 6.123233995736766e-17, r2 = r * r;
    int64_t quarter = (int64_t(turns) + quarters) & 3;
    double odd = r * (1 + r2 * (-1 / 6. + r2 * (1 / 120. + r2 * (-1 / 5040. + r2 * (1 / 362880. - r2 / 39916800.)))));
    double even = 1 + r2 * (-1 / 2. + r2 * (1 / 24. + r2 * (-1 / 720. + r2 * (1 / 40320. - r2 / 3628800.))));
    double result = quarter & 1 ? even : odd;
    return float(quarter & 2 ? -result : result);
}

// out (count) and x (count), contiguous: cosines for 1 quarter of a turn ahead, sines for 0
inline void sines(const Word* a, Shared&, Units units) {
    Share mine(a[2], units);
    for (int64_t i = mine.begin; i < mine.end; i++) ((float*)a[0])[i] = sine(((const float*)a[1])[i], int(a[3]));
}

// out (count, width) contiguous; x rows
template <class T>
void tanh_rows(const Word* a, Shared&, Units units) {
    T* out = (T*)a[0];
    Rows<const T> x{(const T*)a[1], a + 4, a + 7};
    const int64_t width = a[3];
    parts(a[2], width, units, [&](int64_t i, int64_t begin, int64_t end) {
        const T* row = x[i];
        for (int64_t j = begin; j < end; j += LANES) store(out + i * width + j, tanh(load(row + j)));
    });
}

}  // namespace
