// Pairs of products with weights of 4 bits.
#include "pair.cuh"

PAIR_PACKED(Int4, int4)
