// Matrix products with bf16 weights.
#include "gemm.cuh"

GEMM(gemm_bf16_m8, Bf16, 8, 0)
GEMM(gemm_bf16_m16, Bf16, 16, 0)
GEMM(gemm_bf16_wide, Bf16, 32, 0)

KERNELS(EXPORT_ROWS(gemm_bf16))
