// Vector clocks. A thread knows, of every thread of the launch, up to which tick its accesses are ordered before now.
// Most threads know the same, so what is known is kept in shared, never changed pieces: one a block.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

// Time of one thread: it advances whenever the thread publishes what it did. Ticks grow over all launches, so that an
// access of an earlier launch is recognised by its tick alone.
using Tick = uint32_t;

// A counted pointer to an immutable value. Not atomic: a launch is one OS thread.
template <class T>
class Ref {
public:
    Ref() = default;
    explicit Ref(T&& value) : at_(new Counted{std::move(value), 1}) {}
    Ref(const Ref& o) : at_(o.at_) {
        if (at_) at_->count++;
    }
    Ref(Ref&& o) noexcept : at_(std::exchange(o.at_, nullptr)) {}
    Ref& operator=(Ref o) noexcept {
        std::swap(at_, o.at_);
        return *this;
    }
    ~Ref() {
        if (at_ && --at_->count == 0) delete at_;
    }
    explicit operator bool() const { return at_ != nullptr; }
    const T& operator*() const { return at_->value; }
    const T* operator->() const { return &at_->value; }
    bool operator==(const Ref& o) const { return at_ == o.at_; }

private:
    struct Counted {
        T value;
        uint32_t count;
    };
    Counted* at_ = nullptr;
};

// Ticks of the threads of one block.
using Ticks = Ref<std::vector<Tick>>;
// Ticks of every block of the launch; a null piece is a block of which nothing is known.
using Blocks = Ref<std::vector<Ticks>>;

inline Ticks join(const Ticks& a, const Ticks& b) {
    if (!b || a == b) return a;
    if (!a) return b;
    std::vector<Tick> both = *a;
    bool more_than_a = false, more_than_b = false;
    for (size_t i = 0; i < both.size(); i++) {
        const Tick x = both[i], y = (*b)[i];
        more_than_b |= x > y;
        more_than_a |= y > x;
        both[i] = x < y ? y : x;
    }
    if (!more_than_a) return a;
    if (!more_than_b) return b;
    return Ticks(std::move(both));
}

inline Blocks join(const Blocks& a, const Blocks& b) {
    if (!b || a == b) return a;
    if (!a) return b;
    std::vector<Ticks> both = *a;
    for (size_t i = 0; i < both.size(); i++) both[i] = join(both[i], (*b)[i]);
    return Blocks(std::move(both));
}

// What one thread knows: its own block apart, since that is what barriers change.
struct Knowledge {
    Ticks own;
    Blocks others;

    // As one table. `blocks` is how many the launch has, `block` which one this is.
    Blocks table(size_t blocks, size_t block) const {
        std::vector<Ticks> all(blocks);
        if (others) all = *others;
        all[block] = join(all[block], own);
        return Blocks(std::move(all));
    }
    void learn(const Blocks& table, size_t block) {
        if (!table) return;
        own = join(own, (*table)[block]);
        others = join(others, table);
    }
};

}  // namespace emulator
