// What a step does with rows of activations between matrix products: embeddings, norms, rotary embedding, the append to the cache,
// gated products. Formulas: Gemma 4's text decoder, as crates/runtime/src/cpu computes them.
//
// A sum over a row is made by as many threads at any number of rows, each with the same elements, and folded in one order.
// Activations between kernels: the residual stream f32, what matrix products give f32, what they read bf16.
#pragma once

#include "cache.cuh"

namespace rows {

constexpr int THREADS = 256, WARPS = THREADS / 32;
// In a table of tokens: a row that stands for no token, since a drafter proposed fewer.
constexpr uint32_t NO_TOKEN = 0xffffffffu;

enum Planted { NONE, LANES_BY_ROWS, NO_BARRIER };

DEVICE uint16_t to_bf16(float v) {
    return uint16_t(bf16x2(v, 0.0f));
}

// To the nearest, ties to even, of at most 127 either way: the sum's last bit is that of the integer.
DEVICE unsigned char to_int8(float v) {
    return static_cast<unsigned char>(bits(v + 12582912.0f) & 0xffu);
}

// e^x for any x, through 2^x.
DEVICE float exponential(float x) {
    return ex2(x * 1.4426950408889634f);
}

// GELU in its tanh form: z / (1 + e^-2u), u = sqrt(2/pi) (z + 0.044715 z^3), which is 0.5 z (1 + tanh u).
DEVICE float gelu(float z) {
    const float u = 0.7978845608028654f * (z + 0.044715f * z * z * z);
    return z / (1.0f + exponential(-2.0f * u));
}

// Sum over a warp, the same in every lane.
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) v += shuffle_xor(v, lanes);
    return v;
}

// Sum over a block, the same in every thread. `sums` are WARPS words of shared memory, free again when the next barrier is passed.
template <int PLANTED = NONE>
DEVICE float block_sum(float v, float* sums) {
    const int thread = int(threadIdx.x);
    v = warp_sum(v);
    if (thread % 32 == 0) sums[thread / 32] = v;
    if (PLANTED != NO_BARRIER) sync_threads();
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) all += sums[i];
    return all;
}

// 1 / sqrt(mean(x^2) + eps) of x[width] in shared memory, which the block's threads wrote themselves, each its own elements.
template <int PLANTED = NONE>
DEVICE float inverse_rms(const float* x, int width, float eps, float* sums) {
    float sum = 0.0f;
    // What an assignment that follows the number of rows would do.
    const int lanes = PLANTED == LANES_BY_ROWS && gridDim.x == 1 ? THREADS / 2 : THREADS;
    if (lanes == THREADS) {
        for (int i = int(threadIdx.x); i < width; i += THREADS) sum = fmaf(x[i], x[i], sum);
    } else {
        sync_threads();
        if (int(threadIdx.x) < lanes)
            for (int i = int(threadIdx.x); i < width; i += lanes) sum = fmaf(x[i], x[i], sum);
    }
    return rsqrt(block_sum<PLANTED>(sum, sums) / float(width) + eps);
}

// x = E[token] sqrt(hidden), f32, and the same in bf16. A block is a row.
DEVICE void embed(const uint16_t* table, const uint32_t* tokens, float* x, uint16_t* x16, int vocabulary, int hidden, float scale) {
    const uint32_t token = tokens[blockIdx.x], row = token == NO_TOKEN ? 0 : token;
    if (row >= uint32_t(vocabulary)) trap();
    for (int i = int(threadIdx.x); i < hidden; i += THREADS) {
        const size_t at = size_t(blockIdx.x) * size_t(hidden) + size_t(i);
        const float v = bf16_to_f32(ld_nc(table + size_t(row) * size_t(hidden) + size_t(i))) * scale;
        x[at] = v;
        x16[at] = to_bf16(v);
    }
}

// ple = (rms(projected / sqrt(hidden); weight) + T[token] sqrt(size)) / sqrt(2), layer by layer, in place. A warp is a row and a layer.
DEVICE void combine_per_layer(const uint16_t* table, const uint32_t* tokens, const float* weight, float* ple, int rows, int vocabulary,
                              int layers, int size, float projected_scale, float token_scale, float eps) {
    const int lane = int(threadIdx.x) % 32, item = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32;
    if (item >= rows * layers) return;
    const uint32_t token = tokens[item / layers], row = token == NO_TOKEN ? 0 : token;
    if (row >= uint32_t(vocabulary)) trap();
    float* const at = ple + size_t(item) * size_t(size);
    const uint16_t* const embedded = table + (size_t(row) * size_t(layers) + size_t(item % layers)) * size_t(size);
    float sum = 0.0f;
    for (int i = lane; i < size; i += 32) {
        const float v = ld_cg(at + i) * projected_scale;
        sum = fmaf(v, v, sum);
    }
    const float scale = rsqrt(warp_sum(sum) / float(size) + eps);
    for (int i = lane; i < size; i += 32) {
        const float normed = ld_cg(at + i) * projected_scale * scale * ld_nc(weight + i);
        at[i] = (normed + bf16_to_f32(ld_nc(embedded + i)) * token_scale) * 0.70710678118654752f;
    }
}

// y = rms(x; weight) in bf16. A block is a row.
template <int PLANTED = NONE>
DEVICE void norm(const float* x, const float* weight, uint16_t* y, int width, float eps) {
    DYN_SMEM(float, shared);
    float* const row = shared + WARPS;
    const size_t at = size_t(blockIdx.x) * size_t(width);
    for (int i = int(threadIdx.x); i < width; i += THREADS) row[i] = x[at + size_t(i)];
    const float scale = inverse_rms<PLANTED>(row, width, eps, shared);
    for (int i = int(threadIdx.x); i < width; i += THREADS) y[at + size_t(i)] = to_bf16(row[i] * scale * ld_nc(weight + i));
}

// x = (x + rms(added; weight)) * scalar; y = rms(x; next) in bf16, or x itself where there is no next norm. A block is a row.
template <int PLANTED = NONE>
DEVICE void add_normed(const float* added, const float* weight, float* x, float scalar, const float* next, uint16_t* y, int width,
                       float eps) {
    DYN_SMEM(float, shared);
    float *const row = shared + 2 * WARPS, *const again = shared + WARPS;
    const size_t at = size_t(blockIdx.x) * size_t(width);
    for (int i = int(threadIdx.x); i < width; i += THREADS) row[i] = added[at + size_t(i)];
    const float scale = inverse_rms<PLANTED>(row, width, eps, shared);
    for (int i = int(threadIdx.x); i < width; i += THREADS) {
        const float v = (ld_cg(x + at + size_t(i)) + row[i] * scale * ld_nc(weight + i)) * scalar;
        x[at + size_t(i)] = v;
        row[i] = v;
    }
    const float follow = next ? inverse_rms<PLANTED>(row, width, eps, again) : 1.0f;
    for (int i = int(threadIdx.x); i < width; i += THREADS)
        y[at + size_t(i)] = to_bf16(next ? row[i] * follow * ld_nc(next + i) : row[i]);
}

// y = gelu(gate) * other in bf16; strides in elements between rows.
DEVICE void gated(const float* gate, const float* other, uint16_t* y, int rows, int width, int gate_stride, int other_stride) {
    const int i = int(blockIdx.x) * THREADS + int(threadIdx.x), row = int(blockIdx.y);
    if (i >= width || row >= rows) return;
    const float product = gelu(gate[size_t(row) * size_t(gate_stride) + size_t(i)]) * other[size_t(row) * size_t(other_stride) + size_t(i)];
    y[size_t(row) * size_t(width) + size_t(i)] = to_bf16(product);
}

// One head, by one warp: norm, with a weight or without one, then the rotary embedding of its first `pairs` pairs, where there is a weight.
// `rotations` holds cosine and sine of each rotating pair at each position; component m pairs with m + dim / 2. What the product before
// wrote is read around L1. Written as bf16, or where there is room for a scale, as int8.
DEVICE void finish_head(const float* from, const float* weight, const float2* rotations, unsigned char* to, float* scale_to, int position,
                        int dim, int pairs, float eps) {
    const int lane = int(threadIdx.x) % 32, half = dim / 2;
    float sum = 0.0f;
    for (int m = lane; m < half; m += 32) {
        const float a = ld_cg(from + m), b = ld_cg(from + m + half);
        sum = fmaf(a, a, sum);
        sum = fmaf(b, b, sum);
    }
    const float scale = rsqrt(warp_sum(sum) / float(dim) + eps);
    const auto finished = [&](int m, float& a, float& b) {
        a = ld_cg(from + m) * scale;
        b = ld_cg(from + m + half) * scale;
        if (weight) {
            a *= ld_nc(weight + m);
            b *= ld_nc(weight + m + half);
            if (m < pairs) {
                const float2 turn = ld_nc(rotations + size_t(position) * size_t(pairs) + size_t(m));
                const float turned = a * turn.x - b * turn.y;
                b = b * turn.x + a * turn.y;
                a = turned;
            }
        }
    };
    float a, b, inverse = 0.0f;
    if (scale_to) {
        // An int8 can't be NaN: the scale says it for the whole head.
        float most = 0.0f;
        for (int m = lane; m < half; m += 32) {
            finished(m, a, b);
            most = max_nan(most, max_nan(max_nan(a, -a), max_nan(b, -b)));
        }
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) most = max_nan(most, shuffle_xor(most, lanes));
        inverse = most > 0.0f ? 127.0f / most : 0.0f;
        if (lane == 0) *scale_to = most / 127.0f;
    }
    for (int m = lane; m < half; m += 32) {
        finished(m, a, b);
        if (scale_to) {
            to[m] = to_int8(a * inverse);
            to[m + half] = to_int8(b * inverse);
        } else {
            reinterpret_cast<uint16_t*>(to)[m] = to_bf16(a);
            reinterpret_cast<uint16_t*>(to)[m + half] = to_bf16(b);
        }
    }
}

// Where the heads of queries, keys and values [rows, (heads + 2 kv_heads) dim] go, and what they go through: queries and keys are normed
// with a weight and rotated, values are normed without one; keys and values go to the cache, or to the row's side slot, as bf16 or `int8`.
struct Heads {
    const float *q_weight, *k_weight;
    const float2* rotations;
    const int2* table;
    uint16_t* q;
    unsigned char *keys, *values, *side_keys, *side_values;
    int heads, kv_heads, dim, capacity, positions, pairs, int8;
    float eps;
};

// Head `head` of row `row`, by one warp.
DEVICE void place_head(const Heads& h, const float* projected, int row, int head) {
    const int2 place = h.table[row];
    if (place.x < 0 || place.x >= h.positions) trap();
    unsigned char* to = reinterpret_cast<unsigned char*>(h.q + (size_t(row) * size_t(h.heads) + size_t(head)) * size_t(h.dim));
    float* scale_to = nullptr;
    if (head >= h.heads) {
        const bool is_value = head >= h.heads + h.kv_heads, aside = place.y >= 0;
        const int kv_head = (head - h.heads) % h.kv_heads;
        const size_t at = size_t(aside ? place.y : place.x % h.capacity) * size_t(cache::position_bytes(h.int8, h.kv_heads, h.dim));
        unsigned char* const position = (is_value ? aside ? h.side_values : h.values : aside ? h.side_keys : h.keys) + at;
        to = position + kv_head * h.dim * (h.int8 ? 1 : 2);
        if (h.int8) scale_to = reinterpret_cast<float*>(position + h.kv_heads * h.dim) + kv_head;
    }
    const float* const weight = head < h.heads ? h.q_weight : head < h.heads + h.kv_heads ? h.k_weight : nullptr;
    const size_t from = (size_t(row) * size_t(h.heads + 2 * h.kv_heads) + size_t(head)) * size_t(h.dim);
    finish_head(projected + from, weight, h.rotations, to, scale_to, place.x, h.dim, h.pairs, h.eps);
}

// All heads of all rows; a warp is a head of a row.
DEVICE void finish_heads(const float* projected, int rows, const Heads h) {
    const int item = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32, of_row = h.heads + 2 * h.kv_heads;
    if (item < rows * of_row) place_head(h, projected, item / of_row, item % of_row);
}

}  // namespace rows

#define NORM(NAME, PLANTED)                                                                                          \
    KERNEL(NAME, rows::THREADS)(const float* x, const float* weight, uint16_t* y, int width, float eps) {            \
        rows::norm<PLANTED>(x, weight, y, width, eps);                                                               \
    }
#define ADD_NORMED(NAME, PLANTED)                                                                                    \
    KERNEL(NAME, rows::THREADS)(const float* added, const float* weight, float* x, float scalar, const float* next,  \
                                uint16_t* y, int width, float eps) {                                                 \
        rows::add_normed<PLANTED>(added, weight, x, scalar, next, y, width, eps);                                    \
    }
