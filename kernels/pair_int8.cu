// Pairs of products with weights of 8 bits.
#include "pair.cuh"

PAIR_PACKED(Int8, int8)
