// Pairs of products with weights of 2 bits.
#include "pair.cuh"

PAIR_PACKED(Int2, int2)
