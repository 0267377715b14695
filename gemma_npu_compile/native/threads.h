// What the units of a command's work share, and how they divide it.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include <sched.h>

#include "numbers.h"

namespace {

enum Code { BLOCK_OUT_OF_RANGE = 1, SLOT_OUT_OF_RANGE = 2, TOO_LONG = 3, INDEX_OUT_OF_RANGE = 4 };

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Done>
void spin(const Done& done) {
    for (int i = 0; !done(); i++) {
        pause();
        if (i > 200) sched_yield();  // somebody else may have the core of whom we wait for
    }
}

thread_local Word current;  // the command this thread is in, from 1

struct Shared {  // of one run of a program
    float* scratch;
    std::atomic<Word> error{0};  // 0, or code << 32 | the first command that failed, from 1

    void fail(int code) {
        Word none = 0;
        error.compare_exchange_strong(none, Word(code) << 32 | current);
    }
};

struct Units {  // of a command's work: [begin, end) of `all`
    int64_t begin, end, all;
};

struct Share {  // the part [begin, end) of `count` that these units are, in steps of `step`
    int64_t begin, end;
    Share(int64_t count, Units units, int64_t step = 1) {
        int64_t steps = (count + step - 1) / step;
        begin = std::min(count, steps * units.begin / units.all * step);
        end = std::min(count, steps * units.end / units.all * step);
    }
};

// Calls f(row, begin, end) for the parts of rows of `width` elements that fall to these units, cut at whole
// vectors; the last part of a row may end within one.
template <class F>
void parts(int64_t rows, int64_t width, Units units, const F& f) {
    const int64_t pieces = (width + LANES - 1) / LANES;
    Share mine(rows * pieces, units, 16);
    for (int64_t u = mine.begin; u < mine.end;) {
        const int64_t first = u % pieces, last = std::min(pieces, first + mine.end - u);
        f(u / pieces, first * LANES, std::min(width, last * LANES));
        u += last - first;
    }
}

// A tensor seen as rows of its last axis: up to three leading sizes with strides.
template <class T>
struct Rows {
    T* data;
    const Word* size;    // 3 sizes
    const Word* stride;  // 3 strides
    T* operator[](int64_t i) const {
        int64_t c = i % size[2], rest = i / size[2];
        return data + rest / size[1] * stride[0] + rest % size[1] * stride[1] + c * stride[2];
    }
};

thread_local std::vector<float> local;  // one kernel call's own memory

float* own(size_t count) {
    if (local.size() < count) local.resize(count);
    return local.data();
}

}  // namespace
