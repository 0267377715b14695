// Small things between products; numbers are ATen's, bit for bit, except for the bits of a NaN.
#pragma once

#include <type_traits>

#include "threads.h"

namespace {

template <int OP, class V>
inline V combined(V l, V r) {
    return OP == 0 ? l + r : OP == 1 ? l - r : OP == 2 ? l * r : l / r;
}

// out and the operands a, b with up to 4 sizes and strides; float32 arithmetic, one rounding, as ATen does
template <class T, int OP>
void binary(const Word* a, Shared&, Units units) {
    const Word *size = a + 4, *so = a + 8, *sa = a + 12, *sb = a + 16;
    T* out = (T*)a[0];
    const T *left = (const T*)a[1], *right = (const T*)a[2];
    const float fixed = number(a[3]);
    parts(size[0] * size[1] * size[2], size[3], units, [&](int64_t u, int64_t j, int64_t end) {
        int64_t i2 = u % size[2], i1 = u / size[2] % size[1], i0 = u / size[2] / size[1];
        T* to = out + i0 * so[0] + i1 * so[1] + i2 * so[2];
        const T* x = left + i0 * sa[0] + i1 * sa[1] + i2 * sa[2];
        const T* y = right ? right + i0 * sb[0] + i1 * sb[1] + i2 * sb[2] : nullptr;
        if (so[3] == 1 && sa[3] == 1 && (!y || sb[3] == 0 || sb[3] == 1)) {
            Vec r = all(!y ? fixed : sb[3] == 0 ? get(*y) : 0);
            for (; j + LANES <= end; j += LANES) {
                if (y && sb[3] == 1) r = load(y + j);
                store(to + j, combined<OP>(load(x + j), r));
            }
        }
        for (; j < end; j++) put(to[j * so[3]], combined<OP>(get(x[j * sa[3]]), y ? get(y[j * sb[3]]) : fixed));
    });
}

// Where element `u` of four axes lies.
inline int64_t offset(int64_t u, const Word* size, const Word* stride) {
    int64_t found = 0;
    for (int k = 3; k >= 0; u /= size[k--]) found += u % size[k] * stride[k];
    return found;
}

enum Type { I32, I64, BOOL, F32 };

inline int64_t whole(const void* data, int64_t i, Word type) {
    if (type == I32) return ((const int32_t*)data)[i];
    return type == I64 ? ((const int64_t*)data)[i] : ((const uint8_t*)data)[i];
}
inline void put_whole(void* data, int64_t i, Word type, int64_t x) {
    if (type == I32) ((int32_t*)data)[i] = int32_t(x);
    if (type == I64) ((int64_t*)data)[i] = x;
    if (type == BOOL) ((uint8_t*)data)[i] = x != 0;
    if (type == F32) ((float*)data)[i] = float(x);
}

enum Integer { ADD, SUB, MUL, FLOOR_DIVIDE, REMAINDER, EQ, LEAST, MOST };

// Indices, lengths and conversions: types of out and operands at 20; a fixed right operand where no second one is,
// which is not 0 where it divides.
inline void integers(const Word* a, Shared&, Units units) {
    const Word *size = a + 4, *so = a + 8, *sa = a + 12, *sb = a + 16, *type = a + 20;
    Share mine(size[0] * size[1] * size[2] * size[3], units);
    for (int64_t u = mine.begin; u < mine.end; u++) {
        const int64_t to = offset(u, size, so), x = offset(u, size, sa), y = offset(u, size, sb);
        int64_t l = whole((const void*)a[1], x, type[1]), result = 0;
        int64_t r = a[2] ? whole((const void*)a[2], y, type[2]) : a[3];
        switch (a[23]) {
            case ADD: result = l + r; break;
            case SUB: result = l - r; break;
            case MUL: result = l * r; break;
            case FLOOR_DIVIDE: result = l / r - (l % r != 0 && (l < 0) != (r < 0)); break;
            case REMAINDER: result = l % r + (l % r != 0 && (l < 0) != (r < 0) ? r : 0); break;
            case EQ: result = l == r; break;
            case LEAST: result = std::max(l, r); break;
            case MOST: result = std::min(l, r); break;
        }
        put_whole((void*)a[0], to, type[0], result);
    }
}

// out[i] = from[i with index[i] in the place of one axis]; int64 indices, up to 4 axes, elements of `S`
template <class S>
void gather(const Word* a, Shared& shared, Units units) {
    const Word *size = a + 5, *so = a + 9, *si = a + 13, *sf = a + 17;  // the stride of `from` is 0 along that axis
    Share mine(size[0] * size[1] * size[2] * size[3], units);
    for (int64_t u = mine.begin; u < mine.end; u++) {
        const int64_t to = offset(u, size, so), at = offset(u, size, si), from = offset(u, size, sf);
        int64_t chosen = ((const int64_t*)a[2])[at];
        if (chosen < 0 || chosen >= a[3])
            shared.fail(INDEX_OUT_OF_RANGE);
        else
            ((S*)a[0])[to] = ((const S*)a[1])[from + chosen * a[4]];
    }
}

// out and from with up to 4 sizes and strides in elements; of one size, or rounded as ATen rounds
template <class To, class From = To>
void copy(const Word* a, Shared&, Units units) {
    constexpr bool same = std::is_same_v<To, From>;
    const Word *size = a + 2, *so = a + 6, *si = a + 10;
    Share mine(size[0] * size[1] * size[2], units);
    for (int64_t u = mine.begin; u < mine.end; u++) {
        int64_t i2 = u % size[2], i1 = u / size[2] % size[1], i0 = u / size[2] / size[1];
        To* to = (To*)a[0] + i0 * so[0] + i1 * so[1] + i2 * so[2];
        const From* from = (const From*)a[1] + i0 * si[0] + i1 * si[1] + i2 * si[2];
        if (same && so[3] == 1 && si[3] == 1) {
            memcpy(to, from, size[3] * sizeof(To));
            continue;
        }
        for (int64_t j = 0; j < size[3]; j++) {
            if constexpr (same)
                to[j * so[3]] = from[j * si[3]];
            else
                put(to[j * so[3]], get(from[j * si[3]]));
        }
    }
}

// out (count, bytes) contiguous; rows of a table of `room` rows chosen by int64 indices
void take(const Word* a, Shared& shared, Units units) {
    const int64_t* index = (const int64_t*)a[2];
    Share mine(a[3], units);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        if (index[i] < 0 || index[i] >= a[4])
            shared.fail(INDEX_OUT_OF_RANGE);
        else
            memcpy((char*)a[0] + i * a[5], (const char*)a[1] + index[i] * a[5], a[5]);
    }
}

// out int64 (count); x rows of `width`: the first of the largest, a NaN before all
template <class T>
void argmax(const Word* a, Shared&, Units units) {
    Share mine(a[2], units);
    Rows<const T> x{(const T*)a[1], a + 4, a + 7};
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const T* row = x[i];
        const int64_t width = a[3];
        Vec most = all(-INFINITY);
        Int odd = {};
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) {
            Vec v = load(row + j);
            most = pick(v > most, v, most);
            odd |= (Int)(v != v);
        }
        float best = -INFINITY;
        bool nan = false;
        for (int l = 0; l < LANES; l++) {
            best = std::max(best, most[l]);
            nan |= odd[l] != 0;
        }
        for (; j < width; j++) {
            best = std::max(best, get(row[j]));
            nan |= get(row[j]) != get(row[j]);
        }
        for (j = 0; j < width - 1; j++) {
            float v = get(row[j]);
            if (nan ? v != v : v == best) break;
        }
        ((int64_t*)a[0])[i] = j;
    }
}

}  // namespace
