// Pairs of products with weights of 3 bits.
#include "pair.cuh"

PAIR_PACKED(Int3, int3)
