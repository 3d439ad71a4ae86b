// One launch: blocks of fibers, the queue of those that can run, and what they wait for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.hpp"
#include "report.hpp"
#include "wrappers.hpp"

namespace emulator {

struct Options {
    bool checked = false;
    bool cooperative = false;  // all blocks resident
    uint64_t seed = 0;         // 0: threads and blocks in order, no preemption
    uint64_t abort_after = 0;  // ends the launch at this memory access, as a fault would; 0: never
};

// What a launch did. Barriers count once a block, matrix products once a warp.
struct Counts {
    uint64_t threads = 0;
    uint64_t operations = 0;  // loads, stores, copies, atomics, warp operations and barriers, one a thread
    uint64_t products = 0;    // mma
    uint64_t barriers = 0;
    uint64_t shared_bytes = 0;
};

struct Block;

// A copy that was issued and has not been waited for.
struct Copy {
    char* to;
    const char* from;
    uint32_t valid;
    uint32_t group;
    uint32_t site;
};

// One CUDA thread. It lives at the top of its own stack.
struct Fiber : Thread {
    void* stack_pointer = nullptr;
    Block* owner = nullptr;
    uint16_t flat = 0, lane = 0, warp = 0;
    bool done = false;
    const char* waits_for = nullptr;
    Place waits_at{nullptr, 0};
    std::vector<Copy> copies;
    uint32_t group = 0;
    // Order, in checked launches.
    Tick tick = 0;
    Knowledge known;
    Blocks fenced;   // what a relaxed store publishes: what was known at the last fence
    Blocks pending;  // what the next fence learns: what relaxed loads saw published
};

// A thread at a barrier, and what it had done by then.
struct Arrival {
    Fiber* fiber;
    bool waits;
    Tick tick;
    Knowledge known;
};

struct Barrier {
    uint32_t expected = 0;  // 0: all threads of the block
    Place place{nullptr, 0};
    std::vector<Arrival> arrivals;
};

enum class Operation { Barrier, Exchange, Vote, MatrixLoad, Multiply };

// Lanes of one mask meeting at one operation.
struct Meeting {
    uint32_t mask = 0, arrived = 0;
    Operation operation{};
    Place place{nullptr, 0};
    void* arguments[32];
};

struct Warp {
    Meeting meetings[4];
};

struct Block {
    uint32_t number = 0;
    char* shared = nullptr;
    Shadow shadow;  // of the shared memory
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    Barrier barriers[16];
    uint32_t exited = 0;
};

class Launch {
public:
    Launch(Memory& memory, Report& report, const Kernel& kernel, const Options& options, Tick first_tick);
    ~Launch();
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    // False where memory for stacks or shared memory is missing.
    bool run(Index grid, Index block_size, uint32_t shared_bytes, void* const* arguments);
    bool aborted() const { return aborted_; }
    Tick last_tick() const { return last_tick_; }
    Counts counts;

    // Called from kernels.
    void barrier(Fiber& f, int id, int count, bool wait, Place place);
    // Lanes of `mask` meet; the last to arrive runs `act(meeting)` for all.
    template <class F>
    void meet(Fiber& f, uint32_t mask, Operation operation, void* argument, Place place, F&& act);
    void yield(Fiber& f);
    void access(Fiber& f, const void* address, size_t bytes, bool write, bool strong, Cache cache, uint32_t site);
    void preempt(Fiber& f);
    void finding(const Fiber* f, Finding finding);
    // Ends the launch: the calling fiber does not return.
    [[noreturn]] void abort(Fiber& f);
    void publish(Fiber& f, const void* address);
    void observe(Fiber& f, const void* address);
    void acquire(Fiber& f);
    void fence(Fiber& f);
    void polled(Fiber& f);
    void progressed() { polls_ = 0; }
    void copy(Fiber& f, Copy copy);
    void copy_wait(Fiber& f, unsigned pending);
    // Orders arrivals: those that wait learn what anyone of them knew.
    void synchronise(const std::vector<Arrival>& arrivals);
    bool checked() const { return options_.checked; }
    Memory& memory() { return memory_; }

private:
    friend void fiber_main();
    bool start(Block& block, Index grid, Index block_size);
    void drain();
    Fiber* next();
    void wake(Fiber* f);
    void wait(Fiber& f, const char* what, Place place);
    void finish(Fiber& f);
    void release(Block& block, Barrier& b);
    void report_deadlock(const char* kind);
    bool before(const Access& a, const Fiber& f) const;
    void check(Fiber& f, Cell& cell, bool write, bool strong, Cache cache, uint32_t site, const char* name,
               size_t offset, bool global);
    uint64_t random();
    void forget(Block& block);

    Memory& memory_;
    Report& report_;
    const Kernel& kernel_;
    Options options_;
    void* const* arguments_ = nullptr;
    void* main_stack_pointer_ = nullptr;
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<Block*> resident_;
    std::vector<Fiber*> queue_;
    size_t head_ = 0;
    uint32_t shared_bytes_ = 0;
    uint32_t blocks_in_grid_ = 0;
    uint64_t random_ = 0;
    uint64_t until_preemption_ = 0;
    uint64_t accesses_ = 0;
    uint64_t polls_ = 0;
    Tick first_tick_, last_tick_;
    bool aborted_ = false;
    std::unordered_map<const void*, Blocks> published_;
};

// The launch that runs on this OS thread.
extern thread_local Launch* running;

inline Fiber& fiber() {
    return *static_cast<Fiber*>(current);
}

std::string describe(Place place);

template <class F>
void Launch::meet(Fiber& f, uint32_t mask, Operation operation, void* argument, Place place, F&& act) {
    counts.operations++;
    Warp& warp = f.owner->warps[f.warp];
    const uint32_t here = uint32_t(f.owner->fibers.size()) - f.warp * 32;
    mask &= here >= 32 ? ~0u : (1u << here) - 1;
    if (!(mask >> f.lane & 1)) {
        finding(&f, {"WARP-MASK", describe(place), 0, 0, "the calling lane is not in its own mask", ""});
        abort(f);
    }
    Meeting *meeting = nullptr, *vacant = nullptr;
    for (Meeting& m : warp.meetings) {
        if (!m.arrived)
            vacant = vacant ? vacant : &m;
        else if (m.mask == mask)
            meeting = &m;
    }
    if (!meeting) {
        meeting = vacant;
        if (!meeting) {
            finding(&f, {"WARP-MASK", describe(place), 0, 0,
                         "lanes of one warp wait with more different masks than the emulator keeps", ""});
            abort(f);
        }
        meeting->mask = mask;
        meeting->operation = operation;
        meeting->place = place;
    } else if (meeting->operation != operation || meeting->place.line != place.line ||
               meeting->place.file != place.file) {
        finding(&f, {"WARP-DIVERGENCE", describe(place), 0, 0,
                     "lanes of one mask meet at different operations; others wait at " + describe(meeting->place), ""});
        abort(f);
    }
    meeting->arguments[f.lane] = argument;
    meeting->arrived |= 1u << f.lane;
    if (meeting->arrived != meeting->mask) return wait(f, "the other lanes of a warp operation", place);
    act(*meeting);
    meeting->arrived = 0;
    progressed();
    Fiber* const* lanes = &f.owner->fibers[f.warp * 32];
    for (uint32_t left = mask & ~(1u << f.lane); left; left &= left - 1) wake(lanes[__builtin_ctz(left)]);
}

}  // namespace emulator
