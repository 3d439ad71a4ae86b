// What checked launches find, each kind of finding once a place, with the lines of the kernel source.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

// An instruction of the program, from its first byte on. 0: none.
uint32_t site_of(const void* return_address);

struct Finding {
    std::string kind;
    std::string where;   // file:line, where known without looking it up
    uint32_t site = 0;   // else
    uint32_t other = 0;  // the access that it collides with
    std::string what;
    std::string who;  // kernel, block, thread
};

class Report {
public:
    static constexpr size_t MOST = 32;

    void add(Finding finding);
    size_t count() const { return count_; }
    // One line a finding. Looks up lines with addr2line where there is one, else prints addresses.
    std::string text() const;
    void clear();

private:
    std::vector<Finding> findings_;
    size_t count_ = 0;
};

}  // namespace emulator
