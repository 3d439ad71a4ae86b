// Checked launches: every access against the history of its bytes, and the order that atomics and fences give.

#include <cstdio>
#include <cstring>

#include "launch.hpp"

namespace emulator {

bool Launch::before(const Access& a, const Fiber& f) const {
    if (a.tick <= first_tick_) return true;  // none, or of an earlier launch
    if (a.block == f.owner->number) return a.thread == f.flat || (f.known.own && (*f.known.own)[a.thread] >= a.tick);
    if (!f.known.others) return false;
    const Ticks& of_block = (*f.known.others)[a.block];
    return of_block && (*of_block)[a.thread] >= a.tick;
}

static std::string place_in(const char* name, size_t offset) {
    return std::string(name) + " + " + std::to_string(offset);
}

void Launch::check(Fiber& f, Cell& cell, bool write, bool strong, Cache cache, uint32_t site, const char* name,
                   size_t offset, bool global) {
    const auto report = [&](const char* kind, const Access& other, const char* did) {
        char by[96];
        snprintf(by, sizeof by, ", %s by block %u thread %u", did, other.block, other.thread);
        finding(&f, {kind, "", site, other.site, place_in(name, offset) + by, ""});
    };
    if (cell.in_flight)
        return report("COPY-IN-FLIGHT", cell.write, "which a cp.async that nobody waited for writes, issued");
    const Access me{f.tick, f.owner->number, f.flat, strong, site};
    if (!(strong && cell.write.strong) && !before(cell.write, f))
        report(write ? "RACE(write-write)" : "RACE(read-after-write)", cell.write, "written");
    if (write) {
        for (const Access& r : cell.read)
            if (!(strong && r.strong) && !before(r, f)) report("RACE(write-after-read)", r, "read");
        cell.write = me;
        cell.read[0] = cell.read[1] = Access{};
        cell.defined = true;
        return;
    }
    if (!cell.defined) {
        finding(&f, {"UNINITIALISED", "", site, 0, "read of " + place_in(name, offset) + ", which nobody wrote", ""});
        cell.defined = true;  // once is enough
    }
    if (global && cache == Cache::Plain && !strong && cell.write.tick > first_tick_ && cell.write.block != me.block)
        report("STALE-READ", cell.write,
               "through L1, which does not see what was written in this launch; use ld_cg, ld_acquire or cp.async. "
               "Written");
    // Of the readers since the last write, two that a writer may race with; of different warps where there are such.
    Access* const r = cell.read;
    if (r[0].tick > first_tick_ && r[0].same_thread(me))
        r[0] = me;
    else if (r[1].tick > first_tick_ && r[1].same_thread(me))
        r[1] = me;
    else if (before(r[0], f))
        r[0] = me;
    else if (before(r[1], f))
        r[1] = me;
    else
        r[r[0].block == me.block && r[0].thread / 32 == me.thread / 32 ? 0 : 1] = me;
}

void Launch::access(Fiber& f, const void* address, size_t bytes, bool write, bool strong, Cache cache, uint32_t site) {
    const size_t o = memory_.offset(address);
    const auto lost = [&](const char* kind, const std::string& what) {
        finding(&f, {kind, "", site, 0,
                     std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes at " + what, ""});
        abort(f);
    };
    if (o >= Memory::ALL) {
        char at[40];
        snprintf(at, sizeof at, "%p", address);
        lost("WILD-POINTER", std::string(at) + ", which is neither a buffer nor shared memory");
    }
    if (o >= Memory::GLOBAL + Memory::SHARED) return;  // the thread's own stack
    counts.operations++;
    if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && o & (bytes - 1)) {
        finding(&f, {"MISALIGNED", "", site, 0,
                     "access of " + std::to_string(bytes) + " bytes at an address that is no multiple of that", ""});
    }
    Block& block = *f.owner;
    if (o >= Memory::GLOBAL) {
        const size_t at = size_t(static_cast<const char*>(address) - block.shared);
        if (at + bytes > shared_bytes_ || at > shared_bytes_)
            lost("OUT-OF-BOUNDS", "shared memory + " + std::to_string(long(at)) + ", of which the block has " +
                                      std::to_string(shared_bytes_));
        block.shadow.visit(at, bytes, write, [&](Cell& c, size_t byte) {
            check(f, c, write, strong, cache, site, "shared memory", byte, false);
        });
        return;
    }
    Buffer* buffer = memory_.find(address);
    if (!buffer || size_t(static_cast<const char*>(address) - buffer->data) + bytes > buffer->bytes) {
        const Buffer* near = buffer ? buffer : memory_.nearest(address);
        lost("OUT-OF-BOUNDS",
             near ? place_in(near->name.c_str(), size_t(static_cast<const char*>(address) - near->data)) +
                        ", which has " + std::to_string(near->bytes)
                  : "no buffer");
    }
    const size_t at = size_t(static_cast<const char*>(address) - buffer->data);
    Traffic& traffic = buffer->traffic;
    (write ? traffic.written : traffic.read) += bytes;
    if (buffer->constant) {
        if (write) finding(&f, {"WRITE-TO-CONSTANT", "", site, 0, place_in(buffer->name.c_str(), at), ""});
        return;
    }
    // The constant cache is filled and dropped at times that nobody knows: the whole buffer must not change.
    if (!write && cache == Cache::Constant) {
        if (traffic.written)
            finding(&f, {"STALE-READ", "", site, 0, "ld_nc of " + buffer->name + ", which this launch writes", ""});
        traffic.read_as_constant = true;
    }
    if (write && traffic.read_as_constant)
        finding(&f, {"STALE-READ", "", site, 0, "write to " + buffer->name + ", which this launch reads by ld_nc", ""});
    buffer->shadow.visit(at, bytes, write, [&](Cell& c, size_t byte) {
        check(f, c, write, strong, cache, site, buffer->name.c_str(), byte, true);
    });
}

// What a relaxed store to a word makes visible: what the thread had done at its last fence, on top of what the word
// carried.
void Launch::publish(Fiber& f, const void* address) {
    if (f.fenced) {
        Blocks& word = published_[address];
        word = join(word, f.fenced);
    }
}

void Launch::observe(Fiber& f, const void* address) {
    if (const auto word = published_.find(address); word != published_.end()) f.pending = join(f.pending, word->second);
}

void Launch::acquire(Fiber& f) {
    f.known.learn(f.pending, f.owner->number);
}

void Launch::fence(Fiber& f) {
    if (!options_.checked) return;
    acquire(f);
    std::vector<Tick> own = f.known.own ? *f.known.own : std::vector<Tick>(f.owner->fibers.size(), 0);
    own[f.flat] = f.tick++;
    f.known.own = Ticks(std::move(own));
    f.fenced = f.known.table(blocks_in_grid_, f.owner->number);
}

void fence() {
    running->fence(fiber());
}

void load(void* to, const void* from, unsigned bytes, Cache cache) {
    Fiber& f = fiber();
    if (running->checked()) {
        running->preempt(f);
        running->access(f, from, bytes, false, false, cache, site_of(__builtin_return_address(0)));
    }
    memcpy(to, from, bytes);
}

uint32_t load_acquire(const uint32_t* from) {
    Fiber& f = fiber();
    const uint32_t site = site_of(__builtin_return_address(0));
    // Others run first; from here to the value nobody does.
    running->polled(f);
    if (running->checked()) {
        running->preempt(f);
        running->access(f, from, 4, false, true, Cache::L2, site);
        running->observe(f, from);
        running->acquire(f);
    }
    return *from;
}

void store_release(uint32_t* to, uint32_t value) {
    Fiber& f = fiber();
    running->progressed();
    if (running->checked()) {
        running->preempt(f);
        running->fence(f);
        running->access(f, to, 4, true, true, Cache::L2, site_of(__builtin_return_address(0)));
        running->publish(f, to);
    }
    *to = value;
}

uint64_t combine(void* at, unsigned bytes, Combine how, uint64_t value, uint64_t expected, bool acquire_release,
                 bool is_signed) {
    Fiber& f = fiber();
    running->progressed();
    if (running->checked()) {
        running->preempt(f);
        if (acquire_release) running->fence(f);
        running->access(f, at, bytes, true, true, Cache::L2, site_of(__builtin_return_address(0)));
        running->observe(f, at);
        if (acquire_release) running->acquire(f);
        running->publish(f, at);
    }
    uint64_t before = 0;
    memcpy(&before, at, bytes);
    if (is_signed && bytes == 4) before = uint64_t(int64_t(int32_t(before)));
    const bool less = is_signed ? int64_t(value) < int64_t(before) : value < before;
    uint64_t after = before;
    switch (how) {
        case Combine::Add:
            after = before + value;
            break;
        case Combine::Max:
            after = less ? before : value;
            break;
        case Combine::Min:
            after = less ? value : before;
            break;
        case Combine::Exchange:
            after = value;
            break;
        case Combine::Or:
            after = before | value;
            break;
        case Combine::And:
            after = before & value;
            break;
        case Combine::Swap:
            after = before == expected ? value : before;
            break;
    }
    memcpy(at, &after, bytes);
    return before;
}

// Copies: nothing arrives before it is waited for.

void Launch::copy(Fiber& f, Copy copy) {
    counts.operations++;
    if (reinterpret_cast<uintptr_t>(copy.to) % 16 || reinterpret_cast<uintptr_t>(copy.from) % 16) {
        finding(&f, {"MISALIGNED", "", copy.site, 0,
                     "cp.async of 16 bytes between addresses that are no multiples of 16", ""});
        abort(f);
    }
    const size_t at = size_t(copy.to - f.owner->shared);
    if (at > shared_bytes_ || at + 16 > shared_bytes_) {
        finding(&f, {"OUT-OF-BOUNDS", "", copy.site, 0,
                     "cp.async to shared memory + " + std::to_string(long(at)) + ", of which the block has " +
                         std::to_string(shared_bytes_),
                     ""});
        abort(f);
    }
    if (options_.checked) {
        preempt(f);
        if (copy.valid) access(f, copy.from, copy.valid, false, false, Cache::L2, copy.site);
        access(f, copy.to, 16, true, false, Cache::L2, copy.site);
        f.owner->shadow.visit(at, 16, true, [](Cell& c, size_t) { c.in_flight = true; });
        memset(copy.to, 0xff, 16);
    }
    f.copies.push_back(copy);
}

void Launch::copy_wait(Fiber& f, unsigned pending) {
    counts.operations++;
    size_t kept = 0;
    for (const Copy& c : f.copies) {
        if (c.group + pending >= f.group) {
            f.copies[kept++] = c;
            continue;
        }
        memcpy(c.to, c.from, c.valid);
        memset(c.to + c.valid, 0, 16 - c.valid);
        if (!options_.checked) continue;
        // The bytes arrive now, written by the thread that waited.
        const Access me{f.tick, f.owner->number, f.flat, false, c.site};
        f.owner->shadow.visit(size_t(c.to - f.owner->shared), 16, true, [&](Cell& cell, size_t) {
            cell.in_flight = false;
            cell.write = me;
        });
    }
    f.copies.resize(kept);
}

void copy(void* shared, const void* global, unsigned, unsigned valid) {
    Fiber& f = fiber();
    running->copy(f, {static_cast<char*>(shared), static_cast<const char*>(global), valid, f.group,
                      site_of(__builtin_return_address(0))});
}

void copy_commit() {
    fiber().group++;
}

void copy_wait(unsigned pending) {
    running->copy_wait(fiber(), pending);
}

}  // namespace emulator

// The compiler instruments checked kernels as for a race detector (-fsanitize=thread) and for misaligned addresses,
// array bounds and shifts (-fsanitize=alignment,bounds,shift). Its calls land here; no sanitizer's own library is
// linked.

using emulator::Cache;
using emulator::running;

static inline void hook(const void* address, size_t bytes, bool write, const void* return_address) {
    using namespace emulator;
    if (!current) return;
    // The pointer to the running thread, and what the compiler keeps in the program itself.
    const uintptr_t a = reinterpret_cast<uintptr_t>(address);
    extern char end_of_program __asm__("_end");
    extern const char start_of_program __asm__("__executable_start");
    if (a - reinterpret_cast<uintptr_t>(&current) < sizeof current) return;
    if (a >= reinterpret_cast<uintptr_t>(&start_of_program) && a < reinterpret_cast<uintptr_t>(&end_of_program)) {
        if (write) {
            Fiber& f = fiber();
            running->finding(&f, {"WILD-POINTER", "", site_of(return_address), 0,
                                  "write to a variable of the program: kernels have none", ""});
            running->abort(f);
        }
        return;
    }
    if (running->memory().offset(address) - Memory::GLOBAL - Memory::SHARED < Memory::STACKS) return;
    Fiber& f = fiber();
    running->preempt(f);
    running->access(f, address, bytes, write, false, Cache::Plain, site_of(return_address));
}

#define HERE __builtin_return_address(0)
#define HOOKS(BYTES)                                         \
    extern "C" void __tsan_read##BYTES(void* p) {            \
        hook(p, BYTES, false, HERE);                         \
    }                                                        \
    extern "C" void __tsan_write##BYTES(void* p) {           \
        hook(p, BYTES, true, HERE);                          \
    }                                                        \
    extern "C" void __tsan_unaligned_read##BYTES(void* p) {  \
        hook(p, BYTES, false, HERE);                         \
    }                                                        \
    extern "C" void __tsan_unaligned_write##BYTES(void* p) { \
        hook(p, BYTES, true, HERE);                          \
    }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t n) {
    hook(p, n, false, HERE);
}
extern "C" void __tsan_write_range(void* p, size_t n) {
    hook(p, n, true, HERE);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
    hook(from, n, false, HERE);
    hook(to, n, true, HERE);
    return memcpy(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, size_t n) {
    hook(to, n, true, HERE);
    return memset(to, value, n);
}

// What the instrumentation says of a place in the source.
struct SourceLocation {
    const char* file;
    uint32_t line, column;
};

static void undefined(const char* kind, const SourceLocation& at, const std::string& what) {
    using namespace emulator;
    if (!current) return;
    running->finding(&fiber(), {kind, describe({at.file, int(at.line)}), 0, 0, what, ""});
}

struct TypeMismatch {
    SourceLocation at;
    const void* type;
    unsigned char log_alignment, kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t pointer) {
    undefined("MISALIGNED", data->at,
              "access at an address that is " + std::to_string(pointer % (uintptr_t(1) << data->log_alignment)) +
                  " past a multiple of " + std::to_string(1u << data->log_alignment));
}
extern "C" void __ubsan_handle_out_of_bounds(SourceLocation* at, uintptr_t index) {
    undefined("OUT-OF-BOUNDS", *at, "index " + std::to_string(long(index)) + " of an array in registers");
    if (emulator::current) running->abort(emulator::fiber());
}
extern "C" void __ubsan_handle_shift_out_of_bounds(SourceLocation* at, uintptr_t, uintptr_t by) {
    undefined("SHIFT", *at, "shift by " + std::to_string(long(by)) + " bits");
}
