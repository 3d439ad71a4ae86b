#include "shadow.hpp"

#include <sys/mman.h>

namespace emulator {

// An untouched page is zeros, and zeros are an empty history.
static_assert(sizeof(Unit) % 4 == 0);

Shadow::~Shadow() {
    if (units_) munmap(units_, count_ * sizeof(Unit));
}

bool Shadow::resize(size_t bytes) {
    if (units_) munmap(units_, count_ * sizeof(Unit));
    units_ = nullptr;
    count_ = (bytes + 15) / 16;
    if (!count_) return true;
    void* at = mmap(nullptr, count_ * sizeof(Unit), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (at == MAP_FAILED) {
        count_ = 0;
        return false;
    }
    units_ = static_cast<Unit*>(at);
    return true;
}

void Shadow::clear(size_t bytes) {
    for (size_t i = 0; i < (bytes + 15) / 16; i++) {
        units_[i].split = false;
        units_[i].cell[0] = Cell{};
    }
}

void Shadow::define(size_t begin, size_t bytes) {
    visit(begin, bytes, true, [](Cell& cell, size_t) {
        cell = Cell{};
        cell.defined = true;
    });
}

bool Shadow::defined(size_t begin, size_t bytes) const {
    for (size_t i = begin; i < begin + bytes; i++) {
        const Unit& unit = units_[i / 16];
        if (!unit.cell[unit.split ? i % 16 : 0].defined) return false;
    }
    return true;
}

}  // namespace emulator
