// CPU kernels of a captured step, and the loop that replays them.
//
// A program is a list of commands over one array of 64-bit words; program.py writes it. Words are addresses, sizes,
// strides in elements, or the bits of a double. A command's work is cut into units, and threads take several at a time,
// fewer towards the end: what lies together is read by one thread. The next command starts when all are done. A result
// element is computed in one order whatever the number of threads or rows, so results depend on neither. Arithmetic is
// float32; results are rounded once, to nearest even.

#include <mutex>
#include <thread>

#include <pthread.h>

#include "attention.h"
#include "linear.h"
#include "objects.h"
#include "rows.h"
#include "small.h"

namespace {

typedef void (*Kernel)(const Word*, Shared&, Units);

// In the order of program.py.
const Kernel KERNELS[] = {
    linear<float>, linear<bf16>,
    rms_norm<float, float>, rms_norm<bf16, bf16>, rms_norm<bf16, float>,
    add_rms_norm<float, float>, add_rms_norm<bf16, bf16>, add_rms_norm<bf16, float>,
    rotary<float, float>, rotary<bf16, bf16>, rotary<bf16, float>,
    gelu_mul<float>, gelu_mul<bf16>,
    store_kv<int32_t>, store_kv<int64_t>,
    attention<float>, attention<bf16>, combine<float>, combine<bf16>,
    binary<float, 0>, binary<bf16, 0>, binary<float, 1>, binary<bf16, 1>,
    binary<float, 2>, binary<bf16, 2>, binary<float, 3>, binary<bf16, 3>,
    copy<uint8_t>, copy<uint16_t>, copy<uint32_t>, copy<uint64_t>, copy<float, bf16>, copy<bf16, float>,
    take,
    argmax<float>, argmax<bf16>,
    tanh_rows<float>, tanh_rows<bf16>,
    sines,
    integers,
    gather<uint8_t>, gather<uint16_t>, gather<uint32_t>, gather<uint64_t>,
};

// ---- programs

struct Program {
    const Word* words;  // per command: kernel, number of arguments, units of work, arguments
    int64_t count;
};

// Threads that help. The one that runs a program goes from command to command and offers each command's units; who has
// time takes the next ones. A helper that lost its core holds nobody up, unless it lost it with units in hand.
class Pool {
  public:
    std::mutex busy;
    std::vector<float> scratch;

    void run(const Program& program, Shared& given, int threads) {
        for (; helpers < threads - 1; helpers++) std::thread([this] { help(); }).detach();
        shared = &given;
        const Word* next = program.words;
        for (int64_t i = 1; i <= program.count; i++, next += 3 + next[1]) {
            current = i;
            if (next[2] == 1 || threads == 1)
                KERNELS[next[0]](next + 3, given, {0, next[2], next[2]});
            else
                offer(next, i);
        }
    }

  private:
    static constexpr int BITS = 12;  // of a number of units
    static constexpr uint64_t MASK = (1 << BITS) - 1;

    std::atomic<int> helpers{0};
    std::atomic<uint64_t> offered{0};  // serial number of the command, its units, the next unit nobody took
    std::atomic<int> done{0}, sleeping{0};
    std::atomic<uint32_t> ticket{0};
    const Word* at = nullptr;  // these three are read by who took a unit, and while one is out they stay
    Word index = 0;
    Shared* shared = nullptr;

    // Some units of what is offered, if there are any: a share of what is left, so that all end at about the same time.
    bool take() {
        uint64_t seen = offered.load();
        uint64_t units = seen >> BITS & MASK, unit = seen & MASK;
        if (unit >= units) return false;
        uint64_t many = std::max<uint64_t>(1, (units - unit) / (2 * (helpers + 1)));
        if (!offered.compare_exchange_strong(seen, seen + many)) return true;
        current = index;
        KERNELS[at[0]](at + 3, *shared, {int64_t(unit), int64_t(unit + many), int64_t(units)});
        done.fetch_add(int(many), std::memory_order_release);
        return true;
    }
    bool open() const {
        uint64_t seen = offered.load();
        return (seen & MASK) < (seen >> BITS & MASK);
    }
    void offer(const Word* command, Word number) {
        at = command;
        index = number;
        done.store(0, std::memory_order_relaxed);
        uint64_t serial = (offered.load(std::memory_order_relaxed) >> 2 * BITS) + 1;
        offered.store(serial << 2 * BITS | uint64_t(command[2]) << BITS);
        if (sleeping.load()) {
            ticket.fetch_add(1);
            ticket.notify_all();
        }
        while (open()) take();
        spin([&] { return done.load(std::memory_order_acquire) == command[2]; });
    }
    void help() {
        for (;;) {
            uint32_t seen = ticket.load();
            for (int i = 0; i < 2000 && !open(); i++) {
                pause();
                if (i > 200) sched_yield();
            }
            if (!open()) {
                sleeping.fetch_add(1);
                if (!open()) ticket.wait(seen);
                sleeping.fetch_sub(1);
            }
            while (take()) {
            }
        }
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
    Shared shared;
    std::unique_lock<std::mutex> lock(pool->busy, std::try_to_lock);
    Pool alone;  // another thread replays: nothing to wait for
    Pool& mine = lock.owns_lock() ? *pool : alone;
    if (int64_t(mine.scratch.size()) < scratch) mine.scratch.resize(scratch);
    shared.scratch = mine.scratch.data();
    mine.run({words, count}, shared, lock.owns_lock() ? int(threads) : 1);
    return shared.error.load();
}

extern "C" int64_t gemma_npu_chunk() { return CHUNK; }
