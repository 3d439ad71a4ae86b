// Matrix products with weights of 3 bits.
#include "gemm.cuh"

GEMM_PACKED(Int3, int3)
