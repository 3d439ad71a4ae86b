// What a step decides: the best token of each row, which drafts are accepted, what the next step starts from, and what the host is told.
// All state is in device words, so that a recorded step is replayed without the host.
#pragma once

#include "ptx.cuh"

namespace decide {

constexpr int THREADS = 256, WARPS = THREADS / 32, CANDIDATES = 5;
constexpr uint32_t NO_TOKEN = 0xffffffffu;

// The words of a sequence's state.
enum State {
    BASE,      // position of the newest token, which is decided but not run: the cache holds the positions before
    TOKEN,     // the newest token
    ROOM,      // tokens that may still be output
    STOPPED,   // why the sequence ended
    STEPS,     // steps recorded in the ring
    ACCEPTED,  // main drafts that the last step accepted
    BRANCH,    // 1 + branch that it accepted, or 0
    LAST_ROW,  // row whose state the next draft continues from
    BAD,       // a logit was NaN or infinite
    STATE_WORDS = 16
};
enum Stop { RUNNING, AT_STOP_TOKEN, AT_LENGTH, AT_CONTEXT, AT_BAD_LOGITS };

// A record of a step in the ring: how many tokens are output, what was accepted, the reason to stop, tokens output, tokens of the rows.
enum Record { EMITTED, MAIN, SALVAGED, WHY, OUTPUT, INPUT = OUTPUT + 16, RECORD_WORDS = INPUT + 16 };

enum Planted { NONE, HIGHEST_TIE, ANY_BRANCH };

// Hyperbolic tangent; the polynomial is that of kernels::cpu::math (Moshier, Cephes).
DEVICE float tanh_of(float x) {
    const float a = x < 0.0f ? -x : x, z = x * x;
    if (a < 0.625f) {
        float p = -5.7049887e-3f;
        p = p * z + 2.063909e-2f;
        p = p * z - 5.3739716e-2f;
        p = p * z + 1.3331442e-1f;
        p = p * z - 3.333328e-1f;
        return p * z * x + x;
    }
    const float e = ex2(-2.0f * 1.4426950408889634f * a), t = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -t : t;
}

DEVICE bool finite(float v) {
    return (bits(v) & 0x7f800000u) != 0x7f800000u;
}

// c tanh(z / c), or z where there is no cap. What is not finite becomes NaN: a cap would make a plausible logit of an infinity.
DEVICE float capped(float z, float cap) {
    if (!finite(z)) return from_bits(0x7fc00000u);
    return cap > 0.0f ? cap * tanh_of(z / cap) : z;
}

// Orders by logit, and among equals by descending token: the largest is the best. Zeros of both signs are equal. Never 0.
DEVICE uint64_t rank(float logit, uint32_t token) {
    const uint32_t u = bits(logit + 0.0f), ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
    return uint64_t(ordered) << 32 | (0xffffffffu - token);
}
DEVICE uint32_t token_of(uint64_t ranked) {
    return 0xffffffffu - uint32_t(ranked);
}
DEVICE uint64_t shuffle_xor64(uint64_t v, int lanes) {
    return uint64_t(shuffle_xor(uint32_t(v >> 32), lanes)) << 32 | shuffle_xor(uint32_t(v), lanes);
}

// best[row] = the largest rank of the row's logits [rows, count]; ids are the tokens of the head's rows, or null where they are their
// numbers. `best` is zeroed by who reads it. Blocks are (slice, row).
template <int PLANTED = NONE>
DEVICE void best_token(const float* logits, const uint32_t* ids, uint64_t* best, uint32_t* state, int count, float cap) {
    DYN_SMEM(uint64_t, warps);
    const int thread = int(threadIdx.x), row = int(blockIdx.y);
    const float* const from = logits + size_t(row) * size_t(count);
    uint64_t mine = 0;
    bool bad = false;
    for (int i = int(blockIdx.x) * THREADS + thread; i < count; i += int(gridDim.x) * THREADS) {
        const float v = capped(from[i], cap);
        bad |= v != v;
        const uint32_t token = ids ? ld_nc(ids + i) : uint32_t(i);
        mine = max(mine, rank(v, PLANTED == HIGHEST_TIE ? 0x7fffffffu - token : token));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) mine = max(mine, shuffle_xor64(mine, lanes));
    if (bad) atomic_or(state + BAD, 1u);
    if (thread % 32 == 0) warps[thread / 32] = mine;
    sync_threads();
    if (thread == 0) {
        for (int i = 1; i < WARPS; i++) mine = max(mine, warps[i]);
        if (PLANTED == HIGHEST_TIE) mine = (mine >> 32 << 32) | (0xffffffffu - (0x7fffffffu - token_of(mine)));
        atomic_max(best + row, mine);
    }
}

// For scoring: of each row the largest capped logit, the sum of e^(logit - largest), and the logit of the row's target (a row of the head;
// minus infinity where it has none). A block is a row; sums of 128 are folded into the thread's, threads in one order.
DEVICE void score(const float* logits, const int* targets, float* out, uint32_t* state, int count, float cap) {
    DYN_SMEM(float, shared);
    const int thread = int(threadIdx.x), row = int(blockIdx.x);
    const float* const from = logits + size_t(row) * size_t(count);
    float top = -INFINITY;
    bool bad = false;
    for (int i = thread; i < count; i += THREADS) {
        const float v = capped(from[i], cap);
        bad |= v != v;
        top = max(top, v);
    }
    if (bad) atomic_or(state + BAD, 1u);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) top = max(top, shuffle_xor(top, lanes));
    if (thread % 32 == 0) shared[thread / 32] = top;
    sync_threads();
    for (int i = 0; i < WARPS; i++) top = max(top, shared[i]);
    float total = 0.0f, sum = 0.0f;
    int folded = 0;
    for (int i = thread; i < count; i += THREADS) {
        sum += ex2((capped(from[i], cap) - top) * 1.4426950408889634f);
        if (++folded == 128) {
            total += sum;
            sum = 0.0f;
            folded = 0;
        }
    }
    total += sum;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) total += shuffle_xor(total, lanes);
    if (thread % 32 == 0) shared[WARPS + thread / 32] = total;
    sync_threads();
    if (thread == 0) {
        float all = 0.0f;
        for (int i = 0; i < WARPS; i++) all += shared[WARPS + i];
        out[row * 3] = top;
        out[row * 3 + 1] = all;
        const int target = targets[row];
        out[row * 3 + 2] = target >= 0 && target < count ? capped(from[target], cap) : -INFINITY;
    }
}

// Depth of a row, from 4-bit fields: 0 for the base.
DEVICE int depth_of(uint64_t depths, int row) {
    return int(depths >> (4 * row)) & 15;
}

// The rows of a step: the newest token, the main drafts, the branches. Drafts are candidates [depth, CANDIDATES], best first; the branches
// of a depth are its candidates from the second on.
DEVICE void place_rows(const uint32_t* state, const uint32_t* drafts, uint32_t* tokens, int2* table, int rows, int main, uint64_t depths) {
    const int row = int(threadIdx.x);
    if (row >= rows) return;
    const int depth = depth_of(depths, row);
    int candidate = 0;
    for (int r = main + 1; r <= row; r++) candidate += depth_of(depths, r) == depth;
    tokens[row] = row == 0 ? state[TOKEN] : drafts[(depth - 1) * CANDIDATES + candidate];
    table[row] = make_int2(int(state[BASE]) + depth, row > main ? row - main - 1 : -1);
}

// Longest-prefix acceptance with salvage, as crates/runtime/src/speculate defines it; then the next step's start, and a record in the ring.
// One thread: at most 16 rows.
template <int PLANTED = NONE>
DEVICE void accept(uint32_t* state, uint64_t* best, const uint32_t* tokens, const uint32_t* stop_ids, uint32_t* history, uint32_t* ring,
                   int rows, int main, uint64_t depths, int stops, int context, int records) {
    DYN_SMEM(uint32_t, choices);  // a word a row
    if (threadIdx.x != 0) return;
    for (int r = 0; r < rows; r++) {
        choices[r] = token_of(ld_cg(best + r));
        best[r] = 0;
    }
    state[BRANCH] = 0;
    if (ld_cg(state + STOPPED) != RUNNING) return;
    const uint32_t step = ld_cg(state + STEPS);
    uint32_t* const record = ring + 16 + size_t(step % uint32_t(records)) * RECORD_WORDS;
    const int base = int(ld_cg(state + BASE));
    int accepted = 0, branch = 0, last = 0, kept = 0;
    uint32_t why = AT_BAD_LOGITS;
    if (ld_cg(state + BAD) == 0) {
        why = RUNNING;
        // Drafts that the context has no room for do not count.
        const int usable = min(main, context - base - 1);
        while (accepted < usable && tokens[1 + accepted] == choices[accepted]) accepted++;
        const uint32_t choice = choices[accepted];
        last = accepted;
        for (int r = rows - 1; r > main; r--) {
            const int depth = depth_of(depths, r);
            if ((depth == accepted + 1 || PLANTED == ANY_BRANCH) && depth <= usable && tokens[r] == choice) {
                branch = r - main;
                last = r;
            }
        }
        const int count = accepted + 1 + (branch > 0), room = int(ld_cg(state + ROOM));
        while (kept < min(count, room) && why == RUNNING) {
            const uint32_t token = kept < accepted ? tokens[1 + kept] : kept == accepted ? choice : choices[last];
            record[OUTPUT + kept] = token;
            history[base + 1 + kept] = token;
            state[TOKEN] = token;
            for (int i = 0; i < stops; i++)
                if (stop_ids[i] == token) why = AT_STOP_TOKEN;
            kept++;
        }
        state[BASE] = uint32_t(base + kept);
        state[ROOM] = uint32_t(room - kept);
        if (why == RUNNING && room == kept) why = AT_LENGTH;
        if (why == RUNNING && base + kept >= context) why = AT_CONTEXT;
    }
    state[STOPPED] = why;
    state[ACCEPTED] = uint32_t(accepted);
    state[BRANCH] = uint32_t(branch);
    state[LAST_ROW] = uint32_t(last);
    state[STEPS] = step + 1;
    record[EMITTED] = uint32_t(kept);
    record[MAIN] = uint32_t(accepted);
    record[SALVAGED] = uint32_t(branch);
    record[WHY] = why;
    for (int r = 0; r < rows; r++) record[INPUT + r] = tokens[r];
    // The record is whole before it counts.
    fence_system();
    ring[0] = step + 1;
}

// After acceptance: key and value of an accepted branch move to its position, in every layer with keys of its own (blocks 0 .. layers - 1),
// and the row that the next draft continues from becomes the state (the last block).
//
// A layer is 8 words: offsets of keys, values, side keys and side values in pieces of 128 bytes, width in pieces of 16, capacity.
DEVICE void settle(const uint32_t* state, uint4* kv, const uint32_t* layers, const int2* table, const uint16_t* hidden, uint16_t* carried,
                   int count, int main, int width) {
    const int block = int(blockIdx.x), branch = int(state[BRANCH]);
    if (block == count) {
        const size_t from = size_t(state[LAST_ROW]) * size_t(width);
        for (int i = int(threadIdx.x); i < width; i += THREADS) carried[i] = hidden[from + size_t(i)];
        return;
    }
    if (branch == 0) return;
    const uint32_t* const layer = layers + block * 8;
    const int pieces = int(layer[4]), place = table[main + branch].x % int(layer[5]);
    for (int i = int(threadIdx.x); i < 2 * pieces; i += THREADS) {
        const int part = i / pieces, piece = i % pieces;
        const size_t to = size_t(layer[part]) * 8 + size_t(place) * size_t(pieces) + size_t(piece);
        const size_t from = size_t(layer[2 + part]) * 8 + size_t(branch - 1) * size_t(pieces) + size_t(piece);
        kv[to] = ld_cg(kv + from);
    }
}

// Prompt look-up: drafts are what followed the latest earlier occurrence of the longest suffix of at most 3 tokens. One block.
DEVICE void look_up(const uint32_t* state, const uint32_t* history, uint32_t* drafts, int main) {
    DYN_SMEM(uint32_t, warps);
    const int thread = int(threadIdx.x), length = int(state[BASE]) + 1;
    // The best match: its length, then where it ends.
    uint32_t mine = 0;
    for (int end = thread + 1; end < length; end += THREADS) {
        int n = 0;
        while (n < 3 && n < end && history[end - 1 - n] == history[length - 1 - n]) n++;
        if (n) mine = max(mine, uint32_t(n) << 28 | uint32_t(end));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) mine = max(mine, shuffle_xor(mine, lanes));
    if (thread % 32 == 0) warps[thread / 32] = mine;
    sync_threads();
    for (int i = 0; i < WARPS; i++) mine = max(mine, warps[i]);
    const int end = int(mine & 0x0fffffffu);
    for (int i = thread; i < main * CANDIDATES; i += THREADS) {
        const int depth = i / CANDIDATES;
        drafts[i] = mine && i % CANDIDATES == 0 && end + depth < length ? history[end + depth] : NO_TOKEN;
    }
}

}  // namespace decide

#define BEST_TOKEN(NAME, PLANTED)                                                                                        \
    KERNEL(NAME, decide::THREADS)(const float* logits, const uint32_t* ids, uint64_t* best, uint32_t* state, int count, \
                                  float cap) {                                                                          \
        decide::best_token<PLANTED>(logits, ids, best, state, count, cap);                                              \
    }
#define ACCEPT(NAME, PLANTED)                                                                                            \
    KERNEL(NAME, 32)(uint32_t* state, uint64_t* best, const uint32_t* tokens, const uint32_t* stop_ids,                 \
                     uint32_t* history, uint32_t* ring, int rows, int main, uint64_t depths, int stops, int context,    \
                     int records) {                                                                                     \
        decide::accept<PLANTED>(state, best, tokens, stop_ids, history, ring, rows, main, depths, stops, context,       \
                                records);                                                                               \
    }
