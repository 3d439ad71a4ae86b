// Rows of activations between matrix products; see rows.cuh.
#include "rows.cuh"

KERNEL(embed, rows::THREADS)(const uint16_t* table, const uint32_t* tokens, float* x, uint16_t* x16, int vocabulary, int hidden,
                             float scale) {
    rows::embed(table, tokens, x, x16, vocabulary, hidden, scale);
}
KERNEL(combine_per_layer, rows::THREADS)(const uint16_t* table, const uint32_t* tokens, const float* weight, float* ple, int count,
                                         int vocabulary, int layers, int size, float projected_scale, float token_scale, float eps) {
    rows::combine_per_layer(table, tokens, weight, ple, count, vocabulary, layers, size, projected_scale, token_scale, eps);
}
NORM(rms_norm, rows::NONE)
ADD_NORMED(add_normed, rows::NONE)
KERNEL(gated, rows::THREADS)(const float* gate, const float* other, uint16_t* y, int count, int width, int gate_stride,
                             int other_stride) {
    rows::gated(gate, other, y, count, width, gate_stride, other_stride);
}
KERNEL(finish_heads, rows::THREADS)(const float* qkv, const float* q_weight, const float* k_weight, const float2* rotations,
                                    const int2* table, uint16_t* q, unsigned char* keys, unsigned char* values,
                                    unsigned char* side_keys, unsigned char* side_values, int count, int heads, int kv_heads, int dim,
                                    int capacity, int positions, int pairs, int int8, float eps) {
    rows::finish_heads(qkv, count, {q_weight, k_weight, rotations, table, q, keys, values, side_keys, side_values, heads, kv_heads, dim,
                                    capacity, positions, pairs, int8, eps});
}

KERNELS(EXPORT(embed), EXPORT(combine_per_layer), EXPORT(rms_norm), EXPORT(add_normed), EXPORT(gated), EXPORT(finish_heads))
