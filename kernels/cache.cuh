// How a position's keys, or values, are cached: bf16 [kv_heads, dim]; or int8 [kv_heads, dim] and behind them an f32 scale a head, padded to
// 16 bytes. An int8 stands for its product with the scale, rounded to bf16: attention over a cache of int8 has the bits of attention over
// those bf16.
#pragma once

#include "ptx.cuh"

namespace cache {

DEVICE int position_bytes(bool int8, int kv_heads, int dim) {
    return int8 ? kv_heads * dim + (kv_heads * 4 + 15) / 16 * 16 : kv_heads * dim * 2;
}

// The lower two bytes of a word as two bf16.
DEVICE uint32_t expand(uint32_t word, float scale) {
    return bf16x2(float(int32_t(word << 24) >> 24) * scale, float(int32_t(word << 16) >> 24) * scale);
}

// One component of a head of a position.
template <bool INT8>
DEVICE float component(const unsigned char* position, int kv_heads, int dim, int head, int i) {
    const int at = head * dim + i;
    if (!INT8) return bf16_to_f32(reinterpret_cast<const uint16_t*>(position)[at]);
    const float scale = reinterpret_cast<const float*>(position + kv_heads * dim)[head];
    return bf16_to_f32(expand(position[at], scale) & 0xffffu);
}

}  // namespace cache
