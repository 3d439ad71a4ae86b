// Matrix products with weights of 2 bits.
#include "gemm.cuh"

GEMM_PACKED(Int2, int2)
