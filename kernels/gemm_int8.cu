// Matrix products with weights of 8 bits.
#include "gemm.cuh"

GEMM_PACKED(Int8, int8)
