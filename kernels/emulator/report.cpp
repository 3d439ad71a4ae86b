#include "report.hpp"

#include <unistd.h>

#include <cstdio>
#include <map>
#include <set>

// Where the program begins; the linker defines it.
extern "C" const char __executable_start[];

namespace emulator {

uint32_t site_of(const void* return_address) {
    return uint32_t(static_cast<const char*>(return_address) - __executable_start);
}

void Report::add(Finding finding) {
    count_++;
    if (findings_.size() >= MOST) return;
    for (const Finding& f : findings_)
        if (f.kind == finding.kind && f.where == finding.where && f.site == finding.site && f.other == finding.other)
            return;
    findings_.push_back(std::move(finding));
}

void Report::clear() {
    findings_.clear();
    count_ = 0;
}

// file:line of each site: the innermost line that is not one of the wrappers', and the line that called it.
static std::map<uint32_t, std::string> lines_of(const std::set<uint32_t>& sites) {
    std::map<uint32_t, std::string> lines;
    if (sites.empty()) return lines;
    std::string command = "addr2line -a -i -s -e /proc/" + std::to_string(getpid()) + "/exe";
    // An executable that is not position independent is linked at its addresses; byte 16 of an ELF file is its type.
    const bool fixed = __executable_start[16] == 2;
    for (uint32_t s : sites) {
        char address[32];
        // One byte back, into the call itself.
        const auto at = uint64_t(s) - 1 + (fixed ? reinterpret_cast<uint64_t>(__executable_start) : 0);
        snprintf(address, sizeof address, " 0x%llx", static_cast<unsigned long long>(at));
        command += address;
    }
    FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
    if (!pipe) return lines;
    char line[1024];
    auto site = sites.begin();
    bool first = true;
    int shown = 0;
    while (fgets(line, sizeof line, pipe)) {
        std::string text(line);
        while (!text.empty() && text.back() == '\n') text.pop_back();
        if (text.rfind("0x", 0) == 0) {
            if (!first && ++site == sites.end()) break;
            first = false;
            shown = 0;
        } else if (text.rfind("wrappers.hpp", 0) != 0 && text.rfind("language.hpp", 0) != 0 && text[0] != '?' &&
                   shown < 2) {
            if (auto note = text.find(" (discriminator"); note != std::string::npos) text.resize(note);
            lines[*site] += (shown++ ? " in " : "") + text;
        }
    }
    pclose(pipe);
    return lines;
}

std::string Report::text() const {
    std::set<uint32_t> sites;
    for (const Finding& f : findings_)
        for (uint32_t s : {f.site, f.other})
            if (s) sites.insert(s);
    const auto lines = lines_of(sites);
    const auto show = [&](uint32_t site) {
        if (auto known = lines.find(site); known != lines.end()) return known->second;
        char address[32];
        snprintf(address, sizeof address, "+0x%x", site);
        return std::string(address);
    };
    std::string all;
    for (const Finding& f : findings_) {
        all += f.kind + " at " + (f.site ? show(f.site) : f.where) + " [" + f.who + "]: " + f.what;
        if (f.other) all += "; the other access is at " + show(f.other);
        all += "\n";
    }
    return all;
}

}  // namespace emulator
