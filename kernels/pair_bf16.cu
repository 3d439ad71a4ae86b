// Pairs of products with bf16 weights.
#include "pair.cuh"

PAIR(pair_bf16_m8, Bf16, 8, 0, NO_MISTAKE)
PAIR(pair_bf16_m16, Bf16, 16, 0, NO_MISTAKE)

KERNELS(EXPORT_PAIR(pair_bf16))
