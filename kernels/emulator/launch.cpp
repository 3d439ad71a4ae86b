#include "launch.hpp"

#include <algorithm>
#include <cstring>
#include <new>

// Saves the registers that a call preserves, and the stack, of one fiber; restores those of another.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
    .text
    .globl emulator_switch
    .hidden emulator_switch
    .type emulator_switch, @function
emulator_switch:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
    .size emulator_switch, . - emulator_switch
)");

namespace emulator {

thread_local Thread* current = nullptr;
thread_local Launch* running = nullptr;

// A thread that only polls, this many times a live thread without anything changing, waits for ever.
static constexpr uint64_t POLLS = 200;

std::string describe(Place place) {
    if (!place.file) return "?";
    const char* slash = strrchr(place.file, '/');
    return std::string(slash ? slash + 1 : place.file) + ":" + std::to_string(place.line);
}

Launch::Launch(Memory& memory, Report& report, const Kernel& kernel, const Options& options, Tick first_tick)
    : memory_(memory),
      report_(report),
      kernel_(kernel),
      options_(options),
      first_tick_(first_tick),
      last_tick_(first_tick) {
    random_ = options.seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
}

Launch::~Launch() {
    for (Block* b : std::vector<Block*>(resident_)) forget(*b);
}

// xorshift64*: schedules need to be reproducible, not unpredictable.
uint64_t Launch::random() {
    random_ ^= random_ >> 12;
    random_ ^= random_ << 25;
    random_ ^= random_ >> 27;
    return (random_ * 0x2545f4914f6cdd1du) >> 16;
}

void Launch::finding(const Fiber* f, Finding finding) {
    finding.who = kernel_.name;
    if (f) {
        char who[96];
        snprintf(who, sizeof who, " block (%u, %u, %u) thread %u", f->block.x, f->block.y, f->block.z, f->flat);
        finding.who += who;
    }
    report_.add(std::move(finding));
}

// The queue.

Fiber* Launch::next() {
    if (head_ == queue_.size()) {
        queue_.clear();
        head_ = 0;
        return nullptr;
    }
    if (options_.seed) std::swap(queue_[head_], queue_[head_ + random() % (queue_.size() - head_)]);
    Fiber* f = queue_[head_++];
    if (head_ > 4096) {
        queue_.erase(queue_.begin(), queue_.begin() + long(head_));
        head_ = 0;
    }
    return f;
}

void Launch::wake(Fiber* f) {
    f->waits_for = nullptr;
    queue_.push_back(f);
}

// Leaves `f` for the next fiber that can run, or for the launch itself where there is none.
static void leave(Fiber& f, Fiber* to, void* main_stack_pointer) {
    current = to;
    emulator_switch(&f.stack_pointer, to ? to->stack_pointer : main_stack_pointer);
}

void Launch::wait(Fiber& f, const char* what, Place place) {
    f.waits_for = what;
    f.waits_at = place;
    leave(f, next(), main_stack_pointer_);
}

void Launch::yield(Fiber& f) {
    queue_.push_back(&f);
    Fiber* to = next();
    if (to != &f) leave(f, to, main_stack_pointer_);
}

void Launch::preempt(Fiber& f) {
    accesses_++;
    if (options_.abort_after && accesses_ >= options_.abort_after) {
        finding(&f, {"ABORTED", "", 0, 0, "the launch was ended here on request", ""});
        abort(f);
    }
    if (!options_.seed || --until_preemption_) return;
    until_preemption_ = 1 + random() % 64;
    yield(f);
}

void Launch::abort(Fiber& f) {
    aborted_ = true;
    leave(f, nullptr, main_stack_pointer_);
    __builtin_unreachable();
}

void fiber_main() {
    Launch& launch = *running;
    launch.kernel_.call(launch.arguments_);
    launch.finish(fiber());
}

void Launch::finish(Fiber& f) {
    if (!f.copies.empty())
        finding(&f,
                {"COPY-NOT-WAITED", "", f.copies[0].site, 0, "the thread ends while its cp.async is on its way", ""});
    Block& block = *f.owner;
    f.done = true;
    f.waits_for = nullptr;
    block.exited++;
    last_tick_ = std::max(last_tick_, f.tick);
    progressed();
    // Threads that ended do not hold up the others' barrier, as on the GPU; it is a mistake all the same.
    Barrier& b = block.barriers[0];
    if (!b.arrivals.empty() && !b.expected && b.arrivals.size() + block.exited == block.fibers.size())
        release(block, b);
    leave(f, next(), main_stack_pointer_);
    __builtin_unreachable();
}

bool Launch::start(Block& block, Index grid, Index block_size) {
    const uint32_t threads = block_size.x * block_size.y * block_size.z;
    const size_t slot = resident_.size();
    block.shared = memory_.shared_slot(slot);
    if (!block.shared) return false;
    resident_.push_back(&block);
    memset(block.shared, 0xff, shared_bytes_);
    if (options_.checked && !block.shadow.resize(shared_bytes_)) return false;
    block.warps.resize((threads + 31) / 32);
    block.fibers.reserve(threads);
    const uint32_t n = block.number;
    for (uint32_t i = 0; i < threads; i++) {
        const size_t index = 1 + slot * threads + i;  // the first stack holds the arguments
        char* stack = memory_.stack(index);
        if (!stack) return false;
        // Stacks that all begin at the same offset of a page would share a few sets of the cache.
        char* top = stack + Memory::STACK - index % 31 * 128;
        char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(top) - sizeof(Fiber)) & ~uintptr_t(63));
        Fiber* f = new (at) Fiber;
        f->thread = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
        f->block = {n % grid.x, n / grid.x % grid.y, n / (grid.x * grid.y)};
        f->block_size = block_size;
        f->grid = grid;
        f->shared = block.shared;
        f->owner = &block;
        f->flat = uint16_t(i);
        f->lane = i % 32;
        f->warp = uint16_t(i / 32);
        f->tick = first_tick_ + 1;
        // The first switch to the fiber pops six registers and returns into fiber_main, with the stack as after a call.
        void** sp = reinterpret_cast<void**>(at);
        *--sp = nullptr;
        *--sp = reinterpret_cast<void*>(&fiber_main);
        for (int r = 0; r < 6; r++) *--sp = nullptr;
        f->stack_pointer = sp;
        block.fibers.push_back(f);
        queue_.push_back(f);
    }
    return true;
}

void Launch::forget(Block& block) {
    for (Fiber* f : block.fibers) f->~Fiber();
    block.fibers.clear();
    block.shadow.resize(0);
    resident_.erase(std::find(resident_.begin(), resident_.end(), &block));
}

void Launch::drain() {
    if (Fiber* first = next()) {
        current = first;
        emulator_switch(&main_stack_pointer_, first->stack_pointer);
        current = nullptr;
    }
}

bool Launch::run(Index grid, Index block_size, uint32_t shared_bytes, void* const* arguments) {
    // Kernels read their arguments from where they may read: the first stack.
    char* stack = memory_.stack(0);
    if (!stack) return false;
    auto** copies = reinterpret_cast<void**>(stack + Memory::PAGE);
    char* value = stack + 2 * Memory::PAGE;
    for (uint32_t i = 0; i < kernel_.arguments; i++, value += 8) {
        memcpy(value, arguments[i], kernel_.argument_bytes[i]);
        copies[i] = value;
    }
    arguments_ = copies;
    shared_bytes_ = shared_bytes;
    blocks_in_grid_ = grid.x * grid.y * grid.z;
    counts.threads = uint64_t(blocks_in_grid_) * block_size.x * block_size.y * block_size.z;
    counts.shared_bytes = shared_bytes;
    for (const auto& b : memory_.buffers()) b->traffic = Traffic{};
    until_preemption_ = 1 + random() % 64;
    std::vector<uint32_t> order(blocks_in_grid_);
    for (uint32_t i = 0; i < blocks_in_grid_; i++) order[i] = i;
    if (options_.seed)
        for (uint32_t i = blocks_in_grid_; i > 1; i--) std::swap(order[i - 1], order[random() % i]);

    running = this;
    bool room = true;
    for (size_t at = 0; at < order.size() && room && !aborted_;) {
        const size_t together = options_.cooperative ? order.size() : 1;
        for (size_t i = 0; i < together && room; i++) {
            blocks_.push_back(std::make_unique<Block>());
            blocks_.back()->number = order[at++];
            room = start(*blocks_.back(), grid, block_size);
        }
        if (!room) break;
        drain();
        const bool all_ended =
            std::all_of(resident_.begin(), resident_.end(), [](Block* b) { return b->exited == b->fibers.size(); });
        if (!aborted_ && !all_ended) {
            report_deadlock("DEADLOCK");
            aborted_ = true;
        }
        for (const auto& b : blocks_) {
            for (Fiber* f : b->fibers) last_tick_ = std::max(last_tick_, f->tick);
            forget(*b);
        }
        blocks_.clear();
    }
    running = nullptr;
    return room;
}

void Launch::report_deadlock(const char* kind) {
    std::map<std::string, uint32_t> waits;
    const Fiber* one = nullptr;
    for (const Block* b : resident_)
        for (const Fiber* f : b->fibers)
            if (!f->done) {
                if (!one || !one->waits_for) one = f;
                waits[f->waits_for ? std::string(f->waits_for) + " at " + describe(f->waits_at)
                                   : "poll a word that does not change"]++;
            }
    std::string what;
    for (const auto& [where, threads] : waits)
        what += (what.empty() ? "" : "; ") + std::to_string(threads) + " threads wait for " + where;
    if (!options_.cooperative && blocks_in_grid_ > 1)
        what += " (blocks run one after another: the launch is not cooperative)";
    finding(one, {kind, one && one->waits_for ? describe(one->waits_at) : "?", 0, 0, what, ""});
}

void Launch::polled(Fiber& f) {
    size_t live = 0;
    if (++polls_ % 1024 == 0) {
        for (const Block* b : resident_) live += b->fibers.size() - b->exited;
        if (polls_ > 1024 + POLLS * live) {
            report_deadlock("DEADLOCK");
            abort(f);
        }
    }
    yield(f);
}

// Barriers.

void Launch::barrier(Fiber& f, int id, int count, bool wait_too, Place place) {
    counts.operations++;
    Block& block = *f.owner;
    if (id < 0 || id > 15 || count < 0 || count % 32 || uint32_t(count) > block.fibers.size()) {
        finding(&f, {"BARRIER", describe(place), 0, 0,
                     "barrier " + std::to_string(id) + " of " + std::to_string(count) +
                         " threads: there are 16, for a multiple of 32 threads, at most the block's " +
                         std::to_string(block.fibers.size()),
                     ""});
        abort(f);
    }
    Barrier& b = block.barriers[id];
    if (b.arrivals.empty()) {
        b.expected = uint32_t(count);
        b.place = place;
    } else if (b.expected != uint32_t(count)) {
        finding(&f, {"BARRIER", describe(place), 0, 0,
                     "threads meet at one barrier with different counts; others wait at " + describe(b.place), ""});
        abort(f);
    } else if (!count && (b.place.line != place.line || b.place.file != place.file)) {
        finding(&f, {"DIVERGENT-BARRIER", describe(place), 0, 0,
                     "threads of one block meet at different barriers; others wait at " + describe(b.place), ""});
    }
    b.arrivals.push_back({&f, wait_too, f.tick, f.known});
    if (!wait_too) f.tick++;
    const size_t need = b.expected ? b.expected : block.fibers.size() - block.exited;
    if (b.arrivals.size() >= need)
        release(block, b);
    else if (wait_too)
        wait(f, "a barrier", place);
}

// Lets everyone go; the last to arrive, if it waits, is the running fiber and just goes on.
void Launch::release(Block& block, Barrier& b) {
    if (!b.expected && block.exited)
        finding(b.arrivals[0].fiber, {"BARRIER-AFTER-EXIT", describe(b.place), 0, 0,
                                      std::to_string(block.exited) + " threads ended before this barrier of all", ""});
    counts.barriers++;
    progressed();
    if (options_.checked) synchronise(b.arrivals);
    for (const Arrival& a : b.arrivals)
        if (a.waits && a.fiber != current) wake(a.fiber);
    b.arrivals.clear();
}

void Launch::synchronise(const std::vector<Arrival>& arrivals) {
    Ticks own = arrivals[0].known.own;
    Blocks others = arrivals[0].known.others;
    for (const Arrival& a : arrivals) {
        own = join(own, a.known.own);
        others = join(others, a.known.others);
    }
    std::vector<Tick> ticks = own ? *own : std::vector<Tick>(arrivals[0].fiber->owner->fibers.size(), 0);
    for (const Arrival& a : arrivals) ticks[a.fiber->flat] = a.tick;
    const Ticks all(std::move(ticks));
    for (const Arrival& a : arrivals) {
        if (!a.waits) continue;
        a.fiber->known = {all, others};
        a.fiber->tick++;
    }
}

void barrier(int id, int count, bool wait, Place place) {
    running->barrier(fiber(), id, count, wait, place);
}

void warp_barrier(uint32_t mask, Place place) {
    Fiber& f = fiber();
    running->meet(f, mask, Operation::Barrier, nullptr, place, [&](const Meeting& m) {
        if (!running->checked()) return;
        std::vector<Arrival> arrivals;
        for (uint32_t left = m.mask; left; left &= left - 1) {
            Fiber* lane = f.owner->fibers[size_t(f.warp) * 32 + size_t(__builtin_ctz(left))];
            arrivals.push_back({lane, true, lane->tick, lane->known});
        }
        running->synchronise(arrivals);
    });
}

void yield() {
    running->yield(fiber());
}

void trap(const char* why, Place place) {
    Fiber& f = fiber();
    running->finding(&f, {"TRAP", describe(place), 0, 0, why, ""});
    running->abort(f);
}

}  // namespace emulator
