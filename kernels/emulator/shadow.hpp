// The history of every byte: who wrote it last, who read it since, whether it was ever written, whether a copy is on
// its way to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "clocks.hpp"

namespace emulator {

// One access. `strong` accesses (atomics, acquire, release) do not race with each other.
struct Access {
    Tick tick = 0;  // 0: none
    uint32_t block = 0;
    uint16_t thread = 0;
    bool strong = false;
    uint32_t site = 0;

    bool same_thread(const Access& o) const { return block == o.block && thread == o.thread; }
};

struct Cell {
    Access write;
    Access
        read[2];  // of different warps where there were such: a writer that races with all readers is not both of them
    bool defined = false;
    bool in_flight = false;
};

// Sixteen bytes, the unit of vector loads and copies. While they share one history only the first cell is used.
struct Unit {
    Cell cell[16];
    bool split = false;
};

class Shadow {
public:
    Shadow() = default;
    ~Shadow();
    Shadow(const Shadow&) = delete;
    Shadow& operator=(Shadow&& o) noexcept {
        std::swap(units_, o.units_);
        std::swap(count_, o.count_);
        return *this;
    }

    // Forgets everything and covers `bytes`. Pages that no access touches take no memory. False where there is none
    // left.
    bool resize(size_t bytes);
    // Forgets the first `bytes`.
    void clear(size_t bytes);
    // Marks what the host wrote.
    void define(size_t begin, size_t bytes);
    // Whether every byte was written by the host or by a kernel.
    bool defined(size_t begin, size_t bytes) const;

    // Calls `visit(cell, byte)` for the histories of a range, once for a whole unit that shares one. `whole` says that
    // the visit leaves the same history in every byte (a write), which joins a split unit again.
    template <class F>
    void visit(size_t begin, size_t bytes, bool whole, F&& visit) {
        while (bytes) {
            Unit& unit = units_[begin / 16];
            const size_t from = begin % 16, n = bytes < 16 - from ? bytes : 16 - from;
            if (n == 16 && !unit.split) {
                visit(unit.cell[0], begin);
            } else {
                if (!unit.split) {
                    for (int i = 1; i < 16; i++) unit.cell[i] = unit.cell[0];
                    unit.split = true;
                }
                for (size_t i = 0; i < n; i++) visit(unit.cell[from + i], begin + i);
                if (n == 16 && whole) unit.split = false;
            }
            begin += n;
            bytes -= n;
        }
    }

private:
    Unit* units_ = nullptr;
    size_t count_ = 0;
};

}  // namespace emulator
