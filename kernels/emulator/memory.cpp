#include "memory.hpp"

#include <sys/mman.h>

#include <cstring>

namespace emulator {

static void* reserve(size_t bytes, int protection) {
    void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

Memory::Memory() {
    pages_ = static_cast<uint32_t*>(reserve(GLOBAL / PAGE * sizeof(uint32_t), PROT_READ | PROT_WRITE));
    if (pages_) base_ = static_cast<char*>(reserve(ALL, PROT_NONE));
}

Memory::~Memory() {
    if (base_) munmap(base_, ALL);
    if (pages_) munmap(pages_, GLOBAL / PAGE * sizeof(uint32_t));
}

char* Memory::allocate(size_t bytes, const char* name, const void* constant) {
    // A page of its own behind each buffer, so that an access past the end meets nothing.
    const size_t pages = (bytes + PAGE - 1) / PAGE;
    if (bytes > GLOBAL || end_ + (pages + 1) * PAGE > GLOBAL) return nullptr;
    char* data = base_ + end_;
    if (pages && mprotect(data, pages * PAGE, PROT_READ | PROT_WRITE)) return nullptr;
    auto buffer = std::make_unique<Buffer>();
    buffer->name = name;
    buffer->data = data;
    buffer->bytes = bytes;
    buffer->constant = constant != nullptr;
    if (constant) {
        memcpy(data, constant, bytes);
    } else {
        memset(data, 0xff, bytes);  // NaN in every float format
        if (!buffer->shadow.resize(bytes)) return nullptr;
    }
    buffers_.push_back(std::move(buffer));
    for (size_t i = 0; i < pages; i++) pages_[end_ / PAGE + i] = uint32_t(buffers_.size());
    end_ += (pages + 1) * PAGE;
    return data;
}

bool Memory::release(char* data) {
    Buffer* buffer = find(data);
    if (!buffer || buffer->data != data) return false;
    const size_t pages = (buffer->bytes + PAGE - 1) / PAGE;
    // The addresses are not used again: a stale pointer finds no buffer.
    for (size_t i = 0; i < pages; i++) pages_[offset(data) / PAGE + i] = 0;
    madvise(data, pages * PAGE, MADV_DONTNEED);
    mprotect(data, pages * PAGE, PROT_NONE);
    *buffer = Buffer{};
    return true;
}

Buffer* Memory::find(const void* address) const {
    const size_t o = offset(address);
    if (o >= GLOBAL) return nullptr;
    const uint32_t page = pages_[o / PAGE];
    return page ? buffers_[page - 1].get() : nullptr;
}

Buffer* Memory::nearest(const void* address) const {
    Buffer* best = nullptr;
    for (const auto& b : buffers_)
        if (b->data && b->data <= address && (!best || b->data > best->data)) best = b.get();
    return best;
}

char* Memory::shared_slot(size_t i) {
    if ((i + 1) * SHARED_SLOT > SHARED) return nullptr;
    char* at = base_ + GLOBAL + i * SHARED_SLOT;
    for (; shared_slots_ <= i; shared_slots_++)
        if (mprotect(base_ + GLOBAL + shared_slots_ * SHARED_SLOT, SHARED_SLOT, PROT_READ | PROT_WRITE)) return nullptr;
    return at;
}

char* Memory::stack(size_t i) {
    if ((i + 1) * STACK > STACKS) return nullptr;
    // The lowest page stays closed: an overflow faults instead of reaching the next stack.
    for (; stacks_ <= i; stacks_++)
        if (mprotect(base_ + GLOBAL + SHARED + stacks_ * STACK + PAGE, STACK - PAGE, PROT_READ | PROT_WRITE))
            return nullptr;
    return base_ + GLOBAL + SHARED + i * STACK;
}

}  // namespace emulator
