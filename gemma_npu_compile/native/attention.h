// The paged cache: writes, and attention over it.
#pragma once

#include "linear.h"

namespace {

// keys, values (tokens, row bytes) with strides in bytes; caches of `room` slots
template <class S>
void store_kv(const Word* a, Shared& shared, Units units) {
    const S* slots = (const S*)a[4];
    int64_t tokens = a[5], room = a[6], bytes = a[7];
    Share mine(tokens, units);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        int64_t slot = slots[i];
        if (slot < 0 || slot >= room) {
            shared.fail(SLOT_OUT_OF_RANGE);
            continue;
        }
        memcpy((char*)a[2] + slot * bytes, (const char*)a[0] + i * a[8], bytes);
        memcpy((char*)a[3] + slot * bytes, (const char*)a[1] + i * a[9], bytes);
    }
}

constexpr int CHUNK = 256;  // keys a thread handles at a time; part of the numerics, so never of the thread count

struct Attention {
    const Word* a;
    int64_t rows() const { return a[6]; }
    int64_t queries() const { return a[7]; }
    int64_t heads() const { return a[8]; }
    int64_t kv_heads() const { return a[9]; }
    int64_t width() const { return a[10]; }
    int64_t block() const { return a[11]; }
    int64_t blocks() const { return a[12]; }
    int64_t columns() const { return a[13]; }  // of the block table
    int64_t window() const { return a[14]; }   // 0: none
    int64_t chunks() const { return a[16]; }   // most chunks of a row
    int64_t group() const { return heads() / kv_heads() * queries(); }  // queries that read the same keys
    int64_t partial() const { return group() * (width() + 2); }         // floats of a chunk's result
    int64_t length(int64_t row) const { return ((const int32_t*)a[5])[row]; }
    int64_t last(int64_t row, int64_t q) const { return length(row) - queries() + q; }  // position of a query
    int64_t first(int64_t row, int64_t q) const {  // the first key it sees
        return window() ? std::max<int64_t>(0, last(row, q) - window() + 1) : 0;
    }
    template <class T>
    T* at(const Word* strides, Word data, int64_t row, int64_t q, int64_t head) const {
        return (T*)data + row * strides[0] + q * strides[1] + head * strides[2];
    }
};

constexpr int TURN = 32;  // keys whose values stay in the nearest cache until every query has added them

// Adds `count` values, weighted, to the sums of G queries: D times 2 * LANES numbers of each, spread (linear.h).
template <int G, int D, class T>
inline void add_values(const T* const* values, const float* w, int64_t count, int64_t width, int64_t d, float* to) {
    Vec sums[G * 2 * D], both[2 * D];
    for (int g = 0; g < G; g++)
        for (int i = 0; i < 2 * D; i++) sums[g * 2 * D + i] = load(to + g * width + d + i * LANES);
    for (int64_t j = 0; j < count; j++) {
        for (int i = 0; i < D; i++) load_pair(values[j] + d + i * 2 * LANES, both[2 * i], both[2 * i + 1]);
        for (int g = 0; g < G; g++) {
            Vec weight = kept(all(w[g * CHUNK + j]));
            for (int i = 0; i < 2 * D; i++) sums[g * 2 * D + i] = fma(weight, both[i], sums[g * 2 * D + i]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < 2 * D; i++) store(to + g * width + d + i * LANES, sums[g * 2 * D + i]);
}

// The same for the numbers from `d` on, as far as whole steps reach. Few queries take more numbers at a time: a sum
// waits for its last product.
template <int G, int D, class T>
inline int64_t add_from(const T* const* values, const float* w, int64_t count, int64_t width, int64_t d, float* to) {
    for (; d + D * 2 * LANES <= width; d += D * 2 * LANES) add_values<G, D>(values, w, count, width, d, to);
    return d;
}

// Spread weighted sums of `count` values for every query, from the first value to the last.
template <class T>
void weighted_sum(const T* const* values, const float* w, int64_t count, int64_t group, int64_t width, float* to) {
    const int64_t fours = group / 4 * 4;
    for (int64_t i = 0; i < group * width; i += LANES) store(to + i, all(0));
    for (int64_t j = 0; j < count; j += TURN) {
        const int64_t many = std::min<int64_t>(TURN, count - j), ahead = std::min(count, j + 2 * TURN);
        int64_t d = 0;
        for (; d + 2 * LANES <= width; d += 2 * LANES) {
            if (d * sizeof(T) % 64 == 0)
                for (int64_t i = j + TURN; i < ahead; i++) __builtin_prefetch(values[i] + d);
            for (int64_t g = 0; g < fours; g += 4)
                add_values<4, 1>(values + j, w + g * CHUNK + j, many, width, d, to + g * width);
        }
        int64_t g = fours;
        for (; g + 2 <= group; g += 2) {
            int64_t done = add_from<2, 2>(values + j, w + g * CHUNK + j, many, width, 0, to + g * width);
            add_from<2, 1>(values + j, w + g * CHUNK + j, many, width, done, to + g * width);
        }
        if (g < group) {
            int64_t done = add_from<1, 4>(values + j, w + g * CHUNK + j, many, width, 0, to + g * width);
            add_from<1, 1>(values + j, w + g * CHUNK + j, many, width, done, to + g * width);
        }
        for (g = 0; d < width && g < group; g++) {
            Vec sums = load(to + g * width + d);
            for (int64_t i = j; i < j + many; i++) sums = fma(all(w[g * CHUNK + i]), load(values[i] + d), sums);
            store(to + g * width + d, sums);
        }
    }
}

// Products of every query with `count` keys, which are read as NB streams.
template <int NB, class T>
void scores(const T* const* keys, const float* query, int64_t count, int64_t group, int64_t width, float* to) {
    const int64_t part = (count + NB - 1) / NB, far = std::max<int64_t>(1, AHEAD / int64_t(width * sizeof(T)));
    for (int64_t j = 0; j < part; j++) {
        const T *row[NB], *next[NB];
        for (int i = 0; i < NB; i++) {
            row[i] = keys[std::min(j + i * part, count - 1)];
            next[i] = keys[std::min(j + i * part + far, count - 1)];
        }
        float result[4 * NB];
        auto keep = [&](int64_t g, int many) {
            for (int q = 0; q < many; q++)
                for (int i = 0; i < NB; i++)
                    if (j + i * part < count) to[(g + q) * CHUNK + j + i * part] = result[q * NB + i];
        };
        int64_t g = 0;
        for (; NB == 2 && g + 4 <= group; g += 4) {
            tile<4, NB>(query + g * width, width, row, next, width, result);
            keep(g, 4);
        }
        for (; g + 2 <= group; g += 2) {
            tile<2, NB>(query + g * width, width, row, next, width, result);
            keep(g, 2);
        }
        if (g < group) {
            tile<1, NB>(query + g * width, width, row, next, width, result);
            keep(g, 1);
        }
    }
}

// Scores, weights and weighted sum of one chunk for the queries of one kv head; not yet divided by the sum of weights.
template <class T>
void attend(const Attention& s, Shared& shared, int64_t row, int64_t kv_head, int64_t begin, int64_t end, float* to) {
    const int64_t group = s.group(), width = s.width(), count = end - begin, q_len = s.queries();
    float *highest = to, *sums = to + group, *sum_to = to + 2 * group;
    float* query = own(group * width + group * CHUNK);
    float* weights = query + group * width;
    const T *keys[CHUNK], *values[CHUNK];
    const int32_t* table = (const int32_t*)s.a[4] + row * s.a[17];
    const int64_t per_kv = s.heads() / s.kv_heads();
    for (int64_t j = 0; j < count; j++) {
        int64_t position = begin + j, block = table[position / s.block()];
        if (block < 0 || block >= s.blocks()) {
            shared.fail(BLOCK_OUT_OF_RANGE);
            block = 0;
        }
        int64_t offset = ((block * s.block() + position % s.block()) * s.kv_heads() + kv_head) * width;
        keys[j] = (const T*)s.a[2] + offset;
        values[j] = (const T*)s.a[3] + offset;
    }
    for (int64_t g = 0; g < group; g++) {
        const T* from = s.at<const T>(s.a + 18, s.a[1], row, g % q_len, kv_head * per_kv + g / q_len);
        spread(from, width, query + g * width, number(s.a[15]));
    }
    if (group < 4)  // more keys at a time, for as many sums
        scores<4>(keys, query, count, group, width, weights);
    else
        scores<2>(keys, query, count, group, width, weights);
    for (int64_t g = 0; g < group; g++) {
        float* w = weights + g * CHUNK;
        const int64_t from = std::max<int64_t>(0, s.first(row, g % q_len) - begin);
        const int64_t until = std::min(count, s.last(row, g % q_len) + 1 - begin);
        float most = -INFINITY;
        bool odd = false;
        for (int64_t j = from; j < until; j++) {
            most = std::max(most, w[j]);
            odd |= w[j] != w[j];
        }
        if (odd) most = NAN;
        const int64_t padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t j = 0; j < padded; j++)
            if (j < from || j >= until) w[j] = -INFINITY;
        Vec total = all(0);
        for (int64_t j = 0; j < padded; j += LANES) {
            Vec p = from < until ? exp(load(w + j) - all(most)) : all(0);
            store(w + j, p);
            total += p;
        }
        highest[g] = most;
        sums[g] = sum(total);
    }
    weighted_sum(values, weights, count, group, width, sum_to);
}

// The keys any query of a row sees, from the start of a chunk on.
inline void bounds(const Attention& s, Shared& shared, int64_t row, int64_t& begin, int64_t& end) {
    end = s.length(row);
    if (end > s.columns() * s.block()) {
        shared.fail(TOO_LONG);
        end = 0;
    }
    begin = std::min(end, s.first(row, 0) / CHUNK * CHUNK);
}

// All chunks of all rows. out, query: addresses 0, 1 with strides (row, query, head) at 21, 18; keys, values (blocks,
// block, kv_heads, width); table int32 with a row stride; lengths int32.
template <class T>
void attention(const Word* a, Shared& shared, Units units) {
    Attention s{a};
    Share mine(s.rows() * s.kv_heads() * s.chunks(), units);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        int64_t chunk = unit % s.chunks(), head = unit / s.chunks() % s.kv_heads();
        int64_t row = unit / s.chunks() / s.kv_heads(), begin, end;
        bounds(s, shared, row, begin, end);
        int64_t from = begin + chunk * CHUNK, until = std::min(end, from + CHUNK);
        from = std::max(from, std::min(until, s.first(row, 0)));
        if (from < until) attend<T>(s, shared, row, head, from, until, shared.scratch + unit * s.partial());
    }
}

// What the chunks of each row add up to; the words are those of `attention`.
template <class T>
void combine(const Word* a, Shared& shared, Units units) {
    Attention s{a};
    const int64_t group = s.group(), width = s.width(), q_len = s.queries(), per_kv = s.heads() / s.kv_heads();
    Share mine(s.rows() * s.heads() * q_len, units);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        int64_t q = unit % q_len, head = unit / q_len % s.heads(), row = unit / q_len / s.heads(), begin, end;
        bounds(s, shared, row, begin, end);
        int64_t chunks = (end - begin + CHUNK - 1) / CHUNK, g = head % per_kv * q_len + q;
        const float* parts = shared.scratch + (row * s.kv_heads() + head / per_kv) * s.chunks() * s.partial();
        float most = -INFINITY, total = 0, *scale = own(chunks);
        for (int64_t c = 0; c < chunks; c++) {
            float here = parts[c * s.partial() + g];
            most = here > most || here != here ? here : most;
        }
        for (int64_t c = 0; c < chunks; c++) {
            const float* part = parts + c * s.partial();
            scale[c] = part[g] == -INFINITY ? 0.0f : exp(all(part[g] - most))[0];  // a chunk with no key for this query
            total += scale[c] * part[group + g];
        }
        T* to = s.at<T>(a + 21, a[0], row, q, head);
        auto sum_of = [&](int64_t d) {
            Vec acc = all(0);
            for (int64_t c = 0; c < chunks; c++)
                acc = fma(all(scale[c]), load(parts + c * s.partial() + 2 * group + g * width + d), acc);
            return total != 0 ? acc / all(total) : all(0);
        };
        int64_t d = 0;
        for (; d + 2 * LANES <= width; d += 2 * LANES) store_pair(to + d, sum_of(d), sum_of(d + LANES));
        if (d < width) store(to + d, sum_of(d));
    }
}

}  // namespace
