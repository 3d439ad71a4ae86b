// Matrix products with weights of 3 bits and f16 operands.
#include "gemm.cuh"

GEMM_PACKED(Int3Half, int3_f16)
