#include "shadow.hpp"

#include <sys/mman.h>

namespace emulator {

// An untouched page is zeros, and zeros are an empty history.
static_assert(sizeof(Unit) % 4 == 0);

template <class T>
static T* reserve(size_t count) {
    void* at =
        mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
}

Shadow::~Shadow() { release(); }

void Shadow::release() {
    if (units_) munmap(units_, count_ * sizeof(Unit));
    if (others_) munmap(others_, count_ * sizeof(Others));
    units_ = nullptr;
    others_ = nullptr;
    count_ = 0;
}

bool Shadow::resize(size_t bytes) {
    release();
    count_ = (bytes + 15) / 16;
    if (!count_) return true;
    units_ = reserve<Unit>(count_);
    others_ = reserve<Others>(count_);
    if (units_ && others_) return true;
    release();
    return false;
}

void Shadow::clear(size_t bytes) {
    for (size_t i = 0; i < (bytes + 15) / 16; i++) {
        units_[i] = Unit{};
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
        if (!(unit.split ? cell(i) : unit.cell).defined) return false;
    }
    return true;
}

}  // namespace emulator
