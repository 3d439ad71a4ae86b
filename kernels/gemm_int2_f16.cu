// Matrix products with weights of 2 bits and f16 operands.
#include "gemm.cuh"

GEMM_PACKED(Int2Half, int2_f16)
