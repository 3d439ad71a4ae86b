// Matrix products with weights of 4 bits.
#include "gemm.cuh"

GEMM_PACKED(Int4, int4)
