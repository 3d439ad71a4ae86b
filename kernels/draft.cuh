// The drafter: a small Gemma 4 stack whose layers read the target's keys and values, run K times for one token each (formulas:
// crates/runtime/src/drafter/mtp.rs). One pass is a list of phases between which every block must see what all blocks wrote. Each phase is
// a function here; it is a kernel of its own, or a turn of one persistent kernel that runs all phases of all passes with a barrier of the
// grid after each. Both are the same arithmetic: a row of a product belongs to one warp, whichever that is.
//
// Weights are bf16, or int8 with an f32 scale a channel; keys and values as the target caches them, bf16 or int8. Sizes and places of everything are in `plan`, words that the host lays out
// (kernels::step::draft). What a phase reads of another one goes around L1.
#pragma once

#include "attention.cuh"
#include "decide.cuh"
#include "rows.cuh"

namespace draft {

constexpr int THREADS = 256, WARPS = THREADS / 32, CANDIDATES = decide::CANDIDATES, PHASES_OF_LAYER = 7, PHASES_OF_END = 4;

enum Planted { NONE, DROPPED_BARRIER };

// Words of the plan. A matrix is two: where its weights and its scales are. Places are in pieces of 16 bytes.
enum Word {
    LAYERS, HIDDEN, BACKBONE, HEADS, VOCABULARY, CLUSTERS, TOP_CLUSTERS, BACK, EPS, EMBED_SCALE,
    PRE, POST = PRE + 2, CENTROIDS = POST + 2, HEAD = CENTROIDS + 2, ORDER = HEAD + 2, FINAL_NORM,
    // of the scratch memory
    X, MIDDLE, SUM, PROJECTED, QUERIES, ATTENDED, PRODUCT, CARRIED, NORMED, SCORES, CHOSEN, RANKS, PARTIAL, STATS, BARRIER,
    HEADER_WORDS = 64
};
enum LayerWord {
    DIM, KV_HEADS, INNER, WINDOW, CAPACITY, KEYS, VALUES, KIND, POSITIONS, PAIRS, MOST_CHUNKS, SCALAR,
    INPUT_NORM, QUERY_NORM, ATTENTION_NORM, MLP_NORM, PRODUCT_NORM,
    Q, O = Q + 2, GATE = O + 2, UP = GATE + 2, DOWN = UP + 2,
    LAYER_WORDS = 32
};

struct Draft {
    const uint4* weights;
    const uint32_t* plan;
    const uint16_t* embedding;    // the target's, [vocabulary, backbone]
    const float2 *sliding, *full;  // rotations
    const unsigned char* kv;
    const uint32_t* state;        // decide::State
    const uint16_t* carried;      // the target's hidden state, [backbone]
    int2* table;                  // the one row
    uint4* scratch;
    uint32_t* drafts;             // [depth, CANDIDATES]
};

// Words of the plan are read where they are used: held in registers over the passes they would push others out.
DEVICE int word(const Draft& d, int index) {
    return int(d.plan[index]);
}
DEVICE float number(const Draft& d, int index) {
    return from_bits(d.plan[index]);
}
template <class T>
DEVICE T* place(const Draft& d, int index) {
    return reinterpret_cast<T*>(d.scratch + d.plan[index]);
}
DEVICE const float* vector(const Draft& d, int index) {
    return reinterpret_cast<const float*>(d.weights + d.plan[index]);
}

// Row `row` of a matrix times x[k] in shared memory; the same in every lane.
template <bool INT8>
DEVICE float product(const Draft& d, int matrix, int row, int k, const float* x) {
    constexpr int OF_PIECE = INT8 ? 16 : 8;
    const int lane = int(threadIdx.x) % 32, pieces = k / OF_PIECE;
    const uint4* const from = d.weights + d.plan[matrix] + size_t(row) * size_t(pieces);
    float sum = 0.0f;
    for (int piece = lane; piece < pieces; piece += 32) {
        const uint4 w = ld_nc(from + piece);
        const uint32_t word[4] = {w.x, w.y, w.z, w.w};
        const float* const with = x + piece * OF_PIECE;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (INT8)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum = fmaf(float(int32_t(word[i] << (24 - 8 * j)) >> 24), with[i * 4 + j], sum);
            else {
                sum = fmaf(bf16_to_f32(word[i] & 0xffffu), with[i * 2], sum);
                sum = fmaf(from_bits(word[i] & 0xffff0000u), with[i * 2 + 1], sum);
            }
    }
    sum = rows::warp_sum(sum);
    return INT8 ? sum * ld_nc(vector(d, matrix + 1) + row) : sum;
}

// y = matrix x for x in shared memory, which all threads of the block have written; `store(row, value)` is called by one lane.
template <bool INT8, class Store>
DEVICE void products(const Draft& d, int matrix, int count, int k, const float* x, Store store) {
    for (int row = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32; row < count; row += int(gridDim.x) * WARPS) {
        const float value = product<INT8>(d, matrix, row, k, x);
        if (threadIdx.x % 32 == 0) store(row, value);
    }
}

// row = row * 1/rms(row) * weight, each thread its own elements. `sums` is used by nobody else until the next barrier but one.
DEVICE void norm_in_place(float* row, const float* weight, int width, float eps, float* sums) {
    const float scale = rows::inverse_rms(row, width, eps, sums);
    for (int i = int(threadIdx.x); i < width; i += THREADS) row[i] = row[i] * scale * ld_nc(weight + i);
}

// The residual stream in front of layer `layer`, into `row`: what layer - 1 adds and scales is done by every block; block 0 writes it down.
DEVICE void enter(const Draft& d, int layer, float* row, float* sums) {
    const int width = word(d, HIDDEN);
    const float* const from = place<float>(d, layer == 0 ? X : SUM);
    for (int i = int(threadIdx.x); i < width; i += THREADS) row[i] = ld_cg(from + i);
    if (layer == 0) return;
    const int before = HEADER_WORDS + (layer - 1) * LAYER_WORDS;
    norm_in_place(row, vector(d, before + PRODUCT_NORM), width, number(d, EPS), sums);
    for (int i = int(threadIdx.x); i < width; i += THREADS) {
        row[i] = (ld_cg(place<float>(d, MIDDLE) + i) + row[i]) * number(d, before + SCALAR);
        if (blockIdx.x == 0) place<float>(d, X)[i] = row[i];
    }
}

// Phases in front of the layers and in them.
template <bool INT8>
DEVICE void input_phase(const Draft& d, int depth) {
    DYN_SMEM(float, shared);
    const int backbone = word(d, BACKBONE);
    const uint32_t given = depth == 0 ? d.state[decide::TOKEN] : ld_cg(d.drafts + (depth - 1) * CANDIDATES);
    if (given >= uint32_t(word(d, VOCABULARY))) trap();
    for (int i = int(threadIdx.x); i < backbone; i += THREADS) {
        shared[i] = bf16_to_f32(ld_nc(d.embedding + size_t(given) * size_t(backbone) + size_t(i))) * number(d, EMBED_SCALE);
        shared[backbone + i] = depth == 0 ? bf16_to_f32(d.carried[i]) : ld_cg(place<float>(d, CARRIED) + i);
    }
    sync_threads();
    float* const x = place<float>(d, X);
    products<INT8>(d, PRE, word(d, HIDDEN), 2 * backbone, shared, [&](int row, float value) { x[row] = value; });
}

template <bool INT8, bool KV8>
DEVICE void layer_phase(const Draft& d, int layer, int phase) {
    DYN_SMEM(float, shared);
    float *const sums = shared, *const row = shared + 4 * WARPS;
    const int at = HEADER_WORDS + layer * LAYER_WORDS, thread = int(threadIdx.x);
    const int width = word(d, HIDDEN), heads = word(d, HEADS), dim = word(d, at + DIM), inner = word(d, at + INNER);
    const int kv_heads = word(d, at + KV_HEADS), capacity = word(d, at + CAPACITY), window = word(d, at + WINDOW);
    const float eps = number(d, EPS);
    switch (phase) {
        case 0: {  // queries
            enter(d, layer, row, sums);
            norm_in_place(row, vector(d, at + INPUT_NORM), width, eps, sums + WARPS);
            sync_threads();
            float* const to = place<float>(d, PROJECTED);
            products<INT8>(d, at + Q, heads * dim, width, row, [&](int r, float value) { to[r] = value; });
            break;
        }
        case 1: {  // their norm and rotary embedding
            uint16_t* const to = place<uint16_t>(d, QUERIES);
            for (int head = int(blockIdx.x) * WARPS + thread / 32; head < heads; head += int(gridDim.x) * WARPS) {
                const int position = max(d.table[0].x - word(d, BACK), 0);
                if (position >= word(d, at + POSITIONS)) trap();
                rows::finish_head(place<float>(d, PROJECTED) + head * dim, vector(d, at + QUERY_NORM),
                                  word(d, at + KIND) ? d.full : d.sliding, reinterpret_cast<unsigned char*>(to + head * dim), nullptr,
                                  position, dim, word(d, at + PAIRS), eps);
            }
            break;
        }
        case 2:
            attention::partials<512, false, KV8>(place<uint16_t>(d, QUERIES), d.kv + size_t(d.plan[at + KEYS]) * 16,
                                                 d.kv + size_t(d.plan[at + VALUES]) * 16, d.table, place<float>(d, PARTIAL),
                                                 place<float2>(d, STATS), 1, heads, kv_heads, dim, capacity, window,
                                                 word(d, at + MOST_CHUNKS));
            break;
        case 3: {  // chunks are merged: half a block has a head's next 128 columns
            const int slices = (dim + attention::COMBINE_THREADS - 1) / attention::COMBINE_THREADS;
            float* const to = place<float>(d, ATTENDED);
            for (int item = int(blockIdx.x) * 2 + thread / attention::COMBINE_THREADS; item < heads * slices;
                 item += int(gridDim.x) * 2) {
                const int head = item / slices, column = item % slices * attention::COMBINE_THREADS + thread % attention::COMBINE_THREADS;
                const attention::Merged merged = attention::merge_chunks(d.table, place<float>(d, PARTIAL), place<float2>(d, STATS), 1,
                                                                         heads, 0, head, column, dim, window);
                if (column < dim) to[head * dim + column] = merged.o / merged.l;
            }
            break;
        }
        case 4: {
            for (int i = thread; i < heads * dim; i += THREADS) row[i] = ld_cg(place<float>(d, ATTENDED) + i);
            sync_threads();
            float* const to = place<float>(d, SUM);
            products<INT8>(d, at + O, width, heads * dim, row, [&](int r, float value) { to[r] = value; });
            break;
        }
        case 5: {  // gate and up
            for (int i = thread; i < width; i += THREADS) row[i] = ld_cg(place<float>(d, SUM) + i);
            norm_in_place(row, vector(d, at + ATTENTION_NORM), width, eps, sums);
            for (int i = thread; i < width; i += THREADS) {
                row[i] = ld_cg(place<float>(d, X) + i) + row[i];
                if (blockIdx.x == 0) place<float>(d, MIDDLE)[i] = row[i];
            }
            norm_in_place(row, vector(d, at + MLP_NORM), width, eps, sums + WARPS);
            sync_threads();
            float* const to = place<float>(d, PRODUCT);
            products<INT8>(d, at + GATE, inner, width, row, [&](int r, float value) { to[r] = value; });
            products<INT8>(d, at + UP, inner, width, row, [&](int r, float value) { to[r] = rows::gelu(ld_cg(to + r)) * value; });
            break;
        }
        default: {  // down
            for (int i = thread; i < inner; i += THREADS) row[i] = ld_cg(place<float>(d, PRODUCT) + i);
            sync_threads();
            float* const to = place<float>(d, SUM);
            products<INT8>(d, at + DOWN, width, inner, row, [&](int r, float value) { to[r] = value; });
        }
    }
}

// Phases behind the layers: the state for the next pass and the clusters' scores; the best clusters; their tokens' logits; the best tokens.
template <bool INT8>
DEVICE void end_phase(const Draft& d, int depth, int phase) {
    DYN_SMEM(float, shared);
    float *const sums = shared, *const row = shared + 4 * WARPS;
    const int thread = int(threadIdx.x), width = word(d, HIDDEN), clusters = word(d, CLUSTERS), chosen = word(d, TOP_CLUSTERS);
    const int vocabulary = word(d, VOCABULARY), of_cluster = clusters ? vocabulary / clusters : 0;
    const int tokens = clusters ? chosen * of_cluster : vocabulary;
    uint64_t* const ranks = place<uint64_t>(d, RANKS);
    if (phase == 0) {
        enter(d, word(d, LAYERS), row, sums);
        norm_in_place(row, vector(d, FINAL_NORM), width, number(d, EPS), sums + WARPS);
        if (blockIdx.x == 0)
            for (int i = thread; i < width; i += THREADS) place<float>(d, NORMED)[i] = row[i];
        sync_threads();
        float *const next = place<float>(d, CARRIED), *const scores = place<float>(d, SCORES);
        products<INT8>(d, POST, word(d, BACKBONE), width, row, [&](int r, float value) { next[r] = value; });
        products<INT8>(d, CENTROIDS, clusters, width, row, [&](int r, float value) { scores[r] = value; });
    } else if (phase == 1) {
        if (!clusters) return;
        uint64_t* const all = reinterpret_cast<uint64_t*>(row);
        for (int i = thread; i < clusters; i += THREADS) all[i] = decide::rank(ld_cg(place<float>(d, SCORES) + i), uint32_t(i));
        sync_threads();
        for (int i = int(blockIdx.x) * THREADS + thread; i < clusters; i += int(gridDim.x) * THREADS) {
            int better = 0;
            for (int j = 0; j < clusters; j++) better += all[j] > all[i];
            if (better < chosen) place<uint32_t>(d, CHOSEN)[better] = uint32_t(i);
        }
    } else if (phase == 2) {
        for (int i = thread; i < width; i += THREADS) row[i] = ld_cg(place<float>(d, NORMED) + i);
        sync_threads();
        const uint32_t* const order = reinterpret_cast<const uint32_t*>(d.weights + d.plan[ORDER]);
        for (int i = int(blockIdx.x) * WARPS + thread / 32; i < tokens; i += int(gridDim.x) * WARPS) {
            uint32_t token = uint32_t(i);
            if (clusters) {
                const uint32_t cluster = ld_cg(place<uint32_t>(d, CHOSEN) + i / of_cluster);
                token = ld_nc(order + size_t(cluster) * size_t(of_cluster) + size_t(i % of_cluster));
            }
            const float logit = product<INT8>(d, HEAD, int(token), width, row);
            if (thread % 32 == 0) ranks[i] = decide::rank(logit, token);
        }
    } else if (blockIdx.x == 0) {
        uint64_t* const warps = reinterpret_cast<uint64_t*>(shared);
        uint64_t before = ~uint64_t(0);
        for (int candidate = 0; candidate < CANDIDATES; candidate++) {
            uint64_t mine = 0;
            for (int i = thread; i < tokens; i += THREADS) {
                const uint64_t r = ld_cg(ranks + i);
                if (r < before) mine = max(mine, r);
            }
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) mine = max(mine, decide::shuffle_xor64(mine, lanes));
            sync_threads();
            if (thread % 32 == 0) warps[thread / 32] = mine;
            sync_threads();
            for (int i = 0; i < WARPS; i++) mine = max(mine, warps[i]);
            before = mine;
            if (thread == 0) d.drafts[depth * CANDIDATES + candidate] = mine ? decide::token_of(mine) : decide::NO_TOKEN;
        }
    }
}

DEVICE int phases(const Draft& d) {
    return 1 + word(d, LAYERS) * PHASES_OF_LAYER + PHASES_OF_END;
}

template <bool INT8, bool KV8>
DEVICE void phase(const Draft& d, int depth, int index) {
    const int last = 1 + word(d, LAYERS) * PHASES_OF_LAYER;
    if (index == 0) input_phase<INT8>(d, depth);
    else if (index < last) layer_phase<INT8, KV8>(d, (index - 1) / PHASES_OF_LAYER, (index - 1) % PHASES_OF_LAYER);
    else end_phase<INT8>(d, depth, index - last);
}

// Before the first phase of a round: the query's row, and the barrier's words.
DEVICE void begin(const Draft& d) {
    if (threadIdx.x != 0) return;
    d.table[0] = make_int2(int(d.state[decide::BASE]), attention::NO_SELF);
    uint32_t* const words = place<uint32_t>(d, BARRIER);
    words[0] = 0;
    words[1] = 0;
}

// All passes. Every block is resident, and waits for all others after each phase.
template <bool INT8, bool KV8, int PLANTED = NONE>
DEVICE void all_passes(const Draft& d, int depths) {
    uint32_t* const words = place<uint32_t>(d, BARRIER);
    const int count = phases(d);
    uint32_t round = 0;
    for (int depth = 0; depth < depths; depth++)
        for (int index = 0; index < count; index++) {
            phase<INT8, KV8>(d, depth, index);
            if (PLANTED == DROPPED_BARRIER && index == PHASES_OF_LAYER) {
                sync_threads();
                continue;
            }
            round++;
            sync_threads();
            if (threadIdx.x == 0) {
                if (atomic_add_acq_rel(words, 1u) == gridDim.x * round - 1) st_release(words + 1, round);
                while (ld_acquire(words + 1) < round) pause(20);
            }
            sync_threads();
        }
}

}  // namespace draft

#define DRAFT_PARAMETERS                                                                                                   \
    const uint4 *weights, const uint32_t *plan, const uint16_t *embedding, const float2 *sliding, const float2 *full,     \
        const unsigned char *kv, const uint32_t *state, const uint16_t *carried, int2 *table, uint4 *scratch, uint32_t *drafts
#define DRAFT_ARGUMENTS \
    { weights, plan, embedding, sliding, full, kv, state, carried, table, scratch, drafts }
#define DRAFT_PHASE(NAME, INT8, KV8)                                                \
    KERNEL(NAME, draft::THREADS)(DRAFT_PARAMETERS, int depth, int index) {          \
        const draft::Draft d = DRAFT_ARGUMENTS;                                     \
        draft::phase<INT8, KV8>(d, depth, index);                                   \
    }
#define DRAFT_ALL(NAME, INT8, KV8, PLANTED)                            \
    KERNEL_ALONE(NAME, draft::THREADS)(DRAFT_PARAMETERS, int depths) {       \
        const draft::Draft d = DRAFT_ARGUMENTS;                        \
        draft::all_passes<INT8, KV8, PLANTED>(d, depths);                   \
    }
