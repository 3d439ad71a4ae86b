// Matrix products with weights of 4 bits and f16 operands.
#include "gemm.cuh"

GEMM_PACKED(Int4Half, int4_f16)
