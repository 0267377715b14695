// CPU kernels of a captured step, and the loop that replays them.
//
// A program is a list of commands over one array of 64-bit words; library.py writes it. Words are addresses, sizes,
// strides in elements, or the bits of a double. Every thread runs every command and takes its share of the work; a
// barrier stands behind each. A result element is computed by one thread in one order whatever the number of threads or
// rows, so results depend on neither. Arithmetic is float32; results are rounded once, to nearest even.

#include <mutex>
#include <thread>

#include <pthread.h>

#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "small.h"

namespace {

typedef void (*Kernel)(const Word*, Shared&, int, int);

// In the order of library.py.
const Kernel KERNELS[] = {
    linear<float>, linear<bf16>,
    rms_norm<float, float>, rms_norm<bf16, bf16>, rms_norm<bf16, float>,
    add_rms_norm<float, float>, add_rms_norm<bf16, bf16>, add_rms_norm<bf16, float>,
    rotary<float, float>, rotary<bf16, bf16>, rotary<bf16, float>,
    gelu_mul<float>, gelu_mul<bf16>,
    store_kv<int32_t>, store_kv<int64_t>,
    attention<float>, attention<bf16>,
    binary<float, 0>, binary<bf16, 0>, binary<float, 1>, binary<bf16, 1>,
    binary<float, 2>, binary<bf16, 2>, binary<float, 3>, binary<bf16, 3>,
    copy<uint8_t>, copy<uint16_t>, copy<uint32_t>, copy<uint64_t>,
    take,
    argmax<float>, argmax<bf16>,
};

// ---- programs

struct Program {
    const Word* words;  // per command: kernel, number of arguments, arguments
    int64_t count;
};

void execute(const Program& program, Shared& shared, int t) {
    const Word* at = program.words;
    for (int64_t i = 0; i < program.count; i++) {
        current = i + 1;
        KERNELS[at[0]](at + 2, shared, t, shared.threads);
        shared.barrier();
        at += 2 + at[1];
    }
}

struct Pool {
    std::mutex busy;
    std::vector<std::thread> workers;
    std::atomic<uint32_t> ticket{0};
    std::atomic<int> left{0};
    const Program* program = nullptr;
    Shared* shared = nullptr;
    std::vector<float> scratch;

    void work(int index, uint32_t seen) {
        for (;;) {
            for (int i = 0; i < 3000 && ticket.load(std::memory_order_acquire) == seen; i++) pause();
            while (ticket.load(std::memory_order_acquire) == seen) ticket.wait(seen);
            seen = ticket.load(std::memory_order_acquire);
            if (index < shared->threads) execute(*program, *shared, index);
            left.fetch_sub(1, std::memory_order_acq_rel);
        }
    }
    void run(const Program& given, Shared& state) {
        while (int(workers.size()) < state.threads - 1) {
            int index = int(workers.size()) + 1;
            uint32_t seen = ticket.load();
            workers.emplace_back([this, index, seen] { work(index, seen); });
        }
        program = &given;
        shared = &state;
        left.store(int(workers.size()), std::memory_order_relaxed);
        if (state.threads > 1) {
            ticket.fetch_add(1, std::memory_order_acq_rel);
            ticket.notify_all();
        }
        execute(given, state, 0);
        if (state.threads > 1) spin([&] { return left.load(std::memory_order_acquire) == 0; });
    }
};

Pool* pool = new Pool;  // never destroyed: its threads outlive main

struct Fork {  // a child has none of the threads
    Fork() {
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    }
} fork_guard;

}  // namespace

// Run `count` commands; scratch floats they need in all. Returns 0, or code << 32 | the failing command, from 1.
extern "C" int64_t gemma_npu_run(const int64_t* words, int64_t count, int64_t scratch, int64_t threads) {
    Program program{words, count};
    Shared shared;
    std::unique_lock<std::mutex> lock(pool->busy, std::try_to_lock);
    std::vector<float> mine;
    if (!lock.owns_lock()) threads = 1;  // another thread replays: nothing to wait for
    std::vector<float>& space = lock.owns_lock() ? pool->scratch : mine;
    if (int64_t(space.size()) < scratch) space.resize(scratch);
    shared.scratch = space.data();
    shared.threads = int(threads);
    if (lock.owns_lock())
        pool->run(program, shared);
    else
        execute(program, shared, 0);
    return shared.error.load();
}

extern "C" int64_t gemma_npu_chunk() { return CHUNK; }
