// Device memory: one reserved range of addresses, so that an address alone says whether it is a buffer, shared memory
// or a stack.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shadow.hpp"

namespace emulator {

// What a launch did to one buffer. Bytes are counted in checked launches, where every access is seen.
struct Traffic {
    uint64_t read = 0;
    uint64_t written = 0;
    bool read_as_constant = false;  // by ld_nc
};

struct Buffer {
    std::string name;
    char* data = nullptr;
    size_t bytes = 0;
    bool constant = false;  // kernels may not write it; it needs no shadow
    Shadow shadow;
    Traffic traffic;
};

class Memory {
public:
    static constexpr size_t PAGE = 4096;
    static constexpr size_t GLOBAL = size_t(32) << 30;
    static constexpr size_t SHARED_SLOT = size_t(128) << 10;
    static constexpr size_t SHARED = size_t(32) << 20;
    static constexpr size_t STACK = size_t(64) << 10;
    static constexpr size_t STACKS = size_t(3) << 30;
    static constexpr size_t ALL = GLOBAL + SHARED + STACKS;

    Memory();
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    bool ready() const { return base_ != nullptr; }
    // Null where nothing is left. A constant buffer is given its contents now and never again.
    char* allocate(size_t bytes, const char* name, const void* constant);
    bool release(char* data);
    // The buffer that holds `address`, or null.
    Buffer* find(const void* address) const;
    // The buffer that `address` most likely strays from: the nearest one below it.
    Buffer* nearest(const void* address) const;
    const std::vector<std::unique_ptr<Buffer>>& buffers() const { return buffers_; }

    size_t offset(const void* address) const { return size_t(static_cast<const char*>(address) - base_); }
    char* shared_slot(size_t i);  // null where there is none
    char* stack(size_t i);        // lowest address of a stack, null where there is none

private:
    char* base_ = nullptr;
    uint32_t* pages_ = nullptr;  // page of the global range -> index into buffers_, plus one
    size_t end_ = PAGE;
    size_t shared_slots_ = 0, stacks_ = 0;
    std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace emulator
