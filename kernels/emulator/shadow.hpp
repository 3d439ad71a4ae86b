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

// Sixteen bytes, the unit of vector loads and copies. Nearly all of them share one history always, so the histories of the
// other fifteen lie elsewhere: what a launch touches of the shadow fits into few pages.
struct Unit {
    Cell cell;  // of all sixteen bytes, or of the first where they are split
    bool split = false;
};

class Shadow {
public:
    Shadow() = default;
    ~Shadow();
    Shadow(const Shadow&) = delete;
    Shadow& operator=(Shadow&& o) noexcept {
        std::swap(units_, o.units_);
        std::swap(others_, o.others_);
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
                visit(unit.cell, begin);
            } else {
                if (!unit.split) {
                    for (Cell& other : others_[begin / 16].cell) other = unit.cell;
                    unit.split = true;
                }
                for (size_t i = 0; i < n; i++) visit(cell(begin + i), begin + i);
                if (n == 16 && whole) unit.split = false;
            }
            begin += n;
            bytes -= n;
        }
    }

private:
    struct Others {
        Cell cell[15];
    };

    // The history of one byte of a split unit.
    Cell& cell(size_t at) const { return at % 16 ? others_[at / 16].cell[at % 16 - 1] : units_[at / 16].cell; }
    void release();

    Unit* units_ = nullptr;
    Others* others_ = nullptr;  // defined where the unit is split
    size_t count_ = 0;
};

}  // namespace emulator
