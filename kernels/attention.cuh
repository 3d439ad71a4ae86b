// Attention of 1 to 16 rows over cached keys and values, and of each row over itself.
//
//   out(r) = merge(chunks of [low(r), p(r)) in the order of one table of absolute positions; self term of r)
//
// Two launches. `partials` makes, for each chunk, head and row, the largest score, the sum of weights and the weighted sum of values;
// `combine` merges a row's chunks in order, adds the row itself, and divides. A row is (position, side slot): rows of the sequence and
// branches are one thing, and no mask exists but the bound of a row. What a row computes follows from its position alone: chunks and tiles
// begin at positions of the table, and a tile beyond a row's bound leaves its sums as they are, bit for bit.
//
// Rows x the query heads that share a key head are packed into the 16 rows of mma.m16n8k16. Keys and values come in tiles of 32 positions
// through a ring of cp.async stages; positions that no row of the block may see are zeros there, whatever the cache holds. A tile of int8
// becomes one of bf16 once it is there, between two barriers.
#pragma once

#include "cache.cuh"

namespace attention {

constexpr int THREADS = 256, PACKED = 16, TILE = 32, MOST_ROWS = 16, COMBINE_THREADS = 128;
// A row that is not among its own keys: a drafter's query.
constexpr int NO_SELF = -2;
constexpr float LOG2_E = 1.4426950408889634f;

// Mistakes that the tests plant to see themselves fail; none in what is built for a GPU.
enum Planted { NONE, BORDER_AT_BASE, SELF_UNROUNDED, BOUND_TOO_FAR, NO_BARRIER, SWAPPED_CHUNKS };

// The table of kernels::attention: chunks of 64 positions up to 4096, of 256 up to 16384, of 1024 beyond.
DEVICE int chunk_of(int position) {
    if (position < 4096) return position / 64;
    if (position < 16384) return 64 + (position - 4096) / 256;
    return 112 + (position - 16384) / 1024;
}
DEVICE int chunk_begin(int chunk) {
    if (chunk < 64) return chunk * 64;
    if (chunk < 112) return 4096 + (chunk - 64) * 256;
    return 16384 + (chunk - 112) * 1024;
}

// First cached position that a row at `position` sees: a window holds the row itself and window - 1 cached positions.
DEVICE int lowest(int position, int window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// Cached positions [low, high) that any of the rows first .. last sees. Every lane of the warp takes part.
DEVICE int2 visible(const int2* table, int first, int last, int window) {
    const int lane = int(threadIdx.x) % 32, position = table[first + lane < last ? first + lane : last].x;
    int low = lowest(position, window), high = position;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) {
        low = min(low, shuffle_xor(low, lanes));
        high = max(high, shuffle_xor(high, lanes));
    }
    return make_int2(low, high);
}

// Appends (m2, l2, o2) to (m, l, o): largest score, sum of weights, weighted values.
DEVICE void fold(float& m, float& l, float& o, float m2, float l2, float o2) {
    const float top = max(m, m2), mine = ex2((m - top) * LOG2_E), theirs = ex2((m2 - top) * LOG2_E);
    l = fmaf(l2, theirs, l * mine);
    o = fmaf(o2, theirs, o * mine);
    m = top;
}

// Bytes of shared memory, in this order. MOST: largest head.
template <int MOST>
struct Shared {
    static constexpr int STAGES = MOST > 256 ? 2 : 4;
    static constexpr int SCORE_STRIDE = TILE + 4, WEIGHT_STRIDE = TILE / 2 + 4;  // words
    static constexpr int SCORES = 2 * PACKED * SCORE_STRIDE * 4;                 // two halves of k
    static constexpr int WEIGHTS = PACKED * WEIGHT_STRIDE * 4;
    static constexpr int SCALES = PACKED * 4;
};

template <int MOST, bool EXACT, bool INT8, int PLANTED = NONE>
DEVICE void partials(const uint16_t* q, const unsigned char* keys, const unsigned char* values, const int2* table, float* partial,
                     float2* stats, int rows, int heads, int kv_heads, int head_dim, int capacity, int window,
                     int most_chunks) {
    using S = Shared<MOST>;
    constexpr int PAIRS = (MOST / 16 + 7) / 8;  // of n8 tiles of the output, a warp
    const int dim = EXACT ? MOST : head_dim, pieces = dim / 8, steps = dim / 16;
    // Pieces of 16 bytes are turned by their row, so that ldmatrix meets each bank once where the head's size allows.
    const int turn = min(pieces & -pieces, 8) - 1;
    const auto place = [&](int row, int piece) { return (row * pieces + (piece ^ (row & turn))) * 16; };

    DYN_SMEM(unsigned char, shared);
    unsigned char* const queries = shared;
    unsigned char* const ring = queries + PACKED * dim * 2;
    // Of int8 a stage has rows of dim bytes and the 16 that the scale is among; `expanded` is the tile that is worked on.
    const int stage_bytes = INT8 ? TILE * (dim + 16) : TILE * dim * 2, position_bytes = cache::position_bytes(INT8, kv_heads, dim);
    unsigned char* const expanded = ring + S::STAGES * stage_bytes;
    float* const scores = reinterpret_cast<float*>(expanded + (INT8 ? TILE * dim * 2 : 0));
    uint32_t* const weights = reinterpret_cast<uint32_t*>(scores + S::SCORES / 4);
    float* const scales = reinterpret_cast<float*>(weights + S::WEIGHTS / 4);

    const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int group = heads / kv_heads, packed = rows * group, blocks_of_rows = (packed + PACKED - 1) / PACKED;
    const int shift = PLANTED == BORDER_AT_BASE ? -table[0].x & 63 : 0;

    const int2 all = visible(table, 0, rows - 1, window);
    const int first = chunk_of(all.x + shift);
    const int chunks = all.x < all.y ? chunk_of(all.y - 1 + shift) - first + 1 : 0;
    // Rows further apart than the scratch memory was made for.
    if (chunks > most_chunks) trap();
    const int items = chunks * kv_heads * blocks_of_rows;

    for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
        // Blocks of rows are next to each other, so that the second finds keys and values in L2.
        const int of_rows = item % blocks_of_rows, kv_head = item / blocks_of_rows % kv_heads;
        const int slot = item / blocks_of_rows / kv_heads, chunk = first + slot, base = chunk_begin(chunk) - shift;
        const int last_row = min(rows - 1, (of_rows * PACKED + PACKED - 1) / group);
        const int2 seen = visible(table, of_rows * PACKED / group, last_row, window);
        const int begin = max(base, seen.x);
        const int end = min(chunk_begin(chunk + 1) - shift, seen.y + (PLANTED == BOUND_TOO_FAR));
        if (begin >= end) continue;
        // Nobody reads the item before any more.
        sync_threads();

        for (int i = thread; i < PACKED * pieces; i += THREADS) {
            const int row = i / pieces, piece = i % pieces, index = of_rows * PACKED + row;
            const bool valid = index < packed;
            const int head = kv_head * group + index % group;
            const size_t at = valid ? (size_t(index / group) * size_t(heads) + size_t(head)) * size_t(dim) : 0;
            cp_async16_or_zero(queries + place(row, piece), q + at + piece * 8, valid);
        }
        // Step 2i brings the keys of tile i, step 2i + 1 its values.
        const int first_tile = (begin - base) / TILE, tiles = (end - base + TILE - 1) / TILE - first_tile;
        const auto fetch = [&](int step) {
            if (step < 2 * tiles) {
                unsigned char* const to = ring + step % S::STAGES * stage_bytes;
                const unsigned char* const from = step & 1 ? values : keys;
                const int at = base + (first_tile + step / 2) * TILE, copied = INT8 ? steps + 1 : pieces;
                for (int i = thread; i < TILE * copied; i += THREADS) {
                    const int key = i / copied, piece = i % copied, position = at + key;
                    const bool valid = position >= begin && position < end;
                    const size_t place_of = valid ? size_t(position % capacity) * size_t(position_bytes) : 0;
                    const int in_position = !INT8           ? kv_head * dim * 2 + piece * 16
                                            : piece < steps ? kv_head * dim + piece * 16
                                                            : kv_heads * dim + kv_head / 4 * 16;
                    cp_async16_or_zero(to + (INT8 ? key * (dim + 16) + piece * 16 : place(key, piece)), from + place_of + in_position, valid);
                }
            }
            cp_async_commit();
        };
#pragma unroll
        for (int i = 0; i < S::STAGES; i++) fetch(i);
        // What a step brought, as bf16. The tile before is used up by all threads.
        const auto arrived = [&](int step) -> const unsigned char* {
            const unsigned char* const raw = ring + step % S::STAGES * stage_bytes;
            if constexpr (!INT8) {
                return raw;
            } else {
                for (int i = thread; i < TILE * steps; i += THREADS) {
                    const int key = i / steps, piece = i % steps;
                    const unsigned char* const of_key = raw + key * (dim + 16);
                    const uint4 v = reinterpret_cast<const uint4*>(of_key)[piece];
                    const float scale = reinterpret_cast<const float*>(of_key + dim)[kv_head % 4];
                    *reinterpret_cast<uint4*>(expanded + place(key, 2 * piece)) =
                        make_uint4(cache::expand(v.x, scale), cache::expand(v.x >> 16, scale), cache::expand(v.y, scale), cache::expand(v.y >> 16, scale));
                    *reinterpret_cast<uint4*>(expanded + place(key, 2 * piece + 1)) =
                        make_uint4(cache::expand(v.z, scale), cache::expand(v.z >> 16, scale), cache::expand(v.w, scale), cache::expand(v.w >> 16, scale));
                }
                sync_threads();
                return expanded;
            }
        };

        // The row and the two keys of a tile that this thread weighs.
        const int mine = thread / 16, pair = thread % 16, index = of_rows * PACKED + mine;
        const int high = index < packed ? table[index / group].x : 0, low = lowest(high, window);
        const int bound = high + (PLANTED == BOUND_TOO_FAR);
        float m = -INFINITY, l = 0.0f, o[PAIRS][2][4] = {};
        for (int tile = 0; tile < tiles; tile++) {
            cp_async_wait<S::STAGES - 2>();
            sync_threads();
            // The values of the tile before are used up.
            if (tile) fetch(2 * tile - 1 + S::STAGES);

            // Scores: a warp has 8 keys and half of k.
            {
                const unsigned char* const from = arrived(2 * tile);
                const int keys_of = warp % 4 * 8, half = warp / 4, middle = (steps + 1) / 2;
                const int until = half ? steps : middle;
                float sum[4] = {}, total[4] = {};
                int folded = 0;
                for (int step = half ? middle : 0; step < until; step++) {
                    uint32_t a[4], b[2];
                    ldmatrix_x4(a, queries + place(lane % 16, step * 2 + lane / 16));
                    ldmatrix_x2(b, from + place(keys_of + lane % 8, step * 2 + lane / 8 % 2));
                    mma_bf16(sum, a, b);
                    if (++folded % 8 == 0 || step + 1 == until)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            total[i] += sum[i];
                            sum[i] = 0.0f;
                        }
                }
                float* const to = scores + (half * PACKED + g) * S::SCORE_STRIDE + keys_of + t * 2;
                to[0] = total[0];
                to[1] = total[1];
                to[8 * S::SCORE_STRIDE] = total[2];
                to[8 * S::SCORE_STRIDE + 1] = total[3];
            }
            sync_threads();
            fetch(2 * tile + S::STAGES);

            // Weights: 16 threads a row.
            {
                const float* const from = scores + mine * S::SCORE_STRIDE + pair * 2;
                const float* const other = from + PACKED * S::SCORE_STRIDE;
                const int position = base + (first_tile + tile) * TILE + pair * 2;
                const float s0 = position >= low && position < bound ? from[0] + other[0] : -INFINITY;
                const float s1 = position + 1 >= low && position + 1 < bound ? from[1] + other[1] : -INFINITY;
                float top = max(s0, s1);
#pragma unroll
                for (int lanes = 8; lanes; lanes /= 2) top = max(top, shuffle_xor(top, lanes));
                top = max(top, m);
                // Without a key so far there is nothing to scale, and no score to compare with.
                const bool none = top == -INFINITY;
                const float scale = none ? 1.0f : ex2((m - top) * LOG2_E);
                const uint32_t w = none ? 0u : bf16x2(ex2((s0 - top) * LOG2_E), ex2((s1 - top) * LOG2_E));
                // The weights that multiply the values are the rounded ones; so are those in the sum.
                float sum = bf16_to_f32(w & 0xffffu) + bf16_to_f32(w >> 16);
#pragma unroll
                for (int lanes = 8; lanes; lanes /= 2) sum += shuffle_xor(sum, lanes);
                l = fmaf(l, scale, sum);
                m = top;
                weights[mine * S::WEIGHT_STRIDE + pair] = w;
                if (pair == 0) scales[mine] = scale;
            }
            cp_async_wait<S::STAGES - 1>();
            if (PLANTED != NO_BARRIER) sync_threads();

            // Values: a warp has columns 16 (warp + 8 i) and the 15 after.
            const unsigned char* const from = arrived(2 * tile + 1);
            uint32_t a[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++)
                ldmatrix_x4(a[half], weights + lane % 16 * S::WEIGHT_STRIDE + half * 8 + lane / 16 * 4);
            const float upper = scales[g], lower = scales[g + 8];
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int column = warp + 8 * i;
                if (column >= steps) break;
                float sum[2][4] = {};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t v[4];
                    ldmatrix_x4_trans(v, from + place(half * 16 + lane % 16, column * 2 + lane / 16));
                    const uint32_t left[2] = {v[0], v[1]}, right[2] = {v[2], v[3]};
                    mma_bf16(sum[0], a[half], left);
                    mma_bf16(sum[1], a[half], right);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) o[i][j / 4][j % 4] = fmaf(o[i][j / 4][j % 4], j % 4 < 2 ? upper : lower, sum[j / 4][j % 4]);
            }
        }

        const auto row_of = [&](int index) {
            return (size_t(slot) * size_t(rows) + size_t(index / group)) * size_t(heads) + size_t(kv_head * group + index % group);
        };
        if (pair == 0 && index < packed) stats[row_of(index)] = make_float2(m, l);
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int written = of_rows * PACKED + g + lower * 8;
            if (written >= packed) continue;
            float* const to = partial + row_of(written) * size_t(dim);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int column = warp + 8 * i;
                if (column >= steps) break;
#pragma unroll
                for (int j = 0; j < 2; j++)
                    *reinterpret_cast<float2*>(to + column * 16 + j * 8 + t * 2) =
                        make_float2(o[i][j][lower * 2], o[i][j][lower * 2 + 1]);
            }
        }
    }
    cp_async_wait<0>();
}

// A row's sums over its chunks, of one column of one head.
struct Merged {
    float m, l, o;
};

// The chunks of a row in the order of the table. Whole warps call this. What the other launch, or another phase of this one, wrote is read
// around L1.
template <int PLANTED = NONE>
DEVICE Merged merge_chunks(const int2* table, const float* partial, const float2* stats, int rows, int heads, int row, int head,
                           int column, int dim, int window) {
    const int shift = PLANTED == BORDER_AT_BASE ? -table[0].x & 63 : 0, position = table[row].x;
    const int low = lowest(position, window), first = chunk_of(visible(table, 0, rows - 1, window).x + shift);
    const int begin = chunk_of(low + shift) - first;
    const int end = low < position ? chunk_of(position - 1 + shift) - first + 1 : begin;
    const size_t stride = size_t(rows) * size_t(heads), mine = size_t(row) * size_t(heads) + size_t(head);
    Merged merged = {-INFINITY, 0.0f, 0.0f};
#pragma unroll 4
    for (int i = begin; i < end; i++) {
        const size_t at = size_t(PLANTED == SWAPPED_CHUNKS ? end - 1 - i + begin : i) * stride + mine;
        const float2 s = ld_cg(stats + at);
        const float o = column < dim ? ld_cg(partial + at * size_t(dim) + size_t(column)) : 0.0f;
        fold(merged.m, merged.l, merged.o, s.x, s.y, o);
    }
    return merged;
}

// One row and head, and 128 of its columns: at most 112 KiB of partial sums at 131072 positions.
template <bool INT8, int PLANTED = NONE>
DEVICE void combine(const uint16_t* q, const unsigned char* keys, const unsigned char* values, const unsigned char* side_keys,
                    const unsigned char* side_values, const int2* table, const float* partial, const float2* stats, uint16_t* out,
                    int rows, int heads, int kv_heads, int dim, int capacity, int window) {
    DYN_SMEM(float, sums);  // a word a warp
    const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int row = int(blockIdx.x) / heads, head = int(blockIdx.x) % heads;
    const int column = int(blockIdx.y) * COMBINE_THREADS + thread;
    const int2 place = table[row];
    const bool inside = column < dim;
    const size_t mine = size_t(row) * size_t(heads) + size_t(head);
    Merged merged = merge_chunks<PLANTED>(table, partial, stats, rows, heads, row, head, column, dim, window);

    if (place.y != NO_SELF) {
        const int kv_head = head / (heads / kv_heads);
        const bool aside = place.y >= 0;
        const size_t at = size_t(aside ? place.y : place.x % capacity) * size_t(cache::position_bytes(INT8, kv_heads, dim));
        const auto component = [&](const unsigned char* of, int i) { return cache::component<INT8>(of + at, kv_heads, dim, kv_head, i); };
        const unsigned char* const key = aside ? side_keys : keys;
        const unsigned char* const value = aside ? side_values : values;
        // What an own key before its rounding to bf16 would be, where a row is alone.
        const float unrounded = PLANTED == SELF_UNROUNDED && rows == 1 ? 1.001f : 1.0f;
        float score = 0.0f;
        for (int i = thread; i < dim; i += COMBINE_THREADS)
            score = fmaf(bf16_to_f32(q[mine * size_t(dim) + size_t(i)]), component(key, i) * unrounded, score);
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) score += shuffle_xor(score, lanes);
        if (lane == 0) sums[warp] = score;
        sync_threads();
        score = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        fold(merged.m, merged.l, merged.o, score, 1.0f, inside ? component(value, column) : 0.0f);
    }
    if (inside) out[mine * size_t(dim) + size_t(column)] = uint16_t(bf16x2(merged.o / merged.l, 0.0f));
}

}  // namespace attention

#define ATTENTION(NAME, MOST, EXACT, INT8, PLANTED)                                                                       \
    KERNEL(NAME, attention::THREADS)(const uint16_t* q, const unsigned char* keys, const unsigned char* values, const int2* table, \
                                     float* partial, float2* stats, int rows, int heads, int kv_heads, int dim,          \
                                     int capacity, int window, int most_chunks) {                                        \
        attention::partials<MOST, EXACT, INT8, PLANTED>(q, keys, values, table, partial, stats, rows, heads, kv_heads, dim,    \
                                                  capacity, window, most_chunks);                                                   \
    }
#define COMBINE(NAME, INT8, PLANTED)                                                                                      \
    KERNEL(NAME, attention::COMBINE_THREADS)(const uint16_t* q, const unsigned char* keys, const unsigned char* values,   \
                                             const unsigned char* side_keys, const unsigned char* side_values, const int2* table,  \
                                             const float* partial, const float2* stats, uint16_t* out, int rows,         \
                                             int heads, int kv_heads, int dim, int capacity, int window) {               \
        attention::combine<INT8, PLANTED>(q, keys, values, side_keys, side_values, table, partial, stats, out, rows, heads,    \
                                    kv_heads, dim, capacity, window);                                                    \
    }
