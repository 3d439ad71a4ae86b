// Matrix products of int8 weights, one scale a channel, with int8 inputs, one scale a row: y = sum * weight scale * input scale, rounded
// after every multiplication. Sums are exact, so that any cut of k gives the same bits.
#include "gemm.cuh"

#define GEMM_DOT(NAME, ROWS)                                                                                                       \
    KERNEL_ALONE(NAME, THREADS)(const uint4* weights, const uint16_t* scales, const signed char* x, const float* x_scale, float* y,           \
                          int32_t* partial, uint32_t* counters, int rows, int n, int k, int segments) {                            \
        gemm<Int8Dot, ROWS, 0>(weights, scales, x, x_scale, {}, {y, nullptr, nullptr, 0, STORE}, partial, counters,                \
                               {rows, n, k, segments});                                                                            \
    }

GEMM_DOT(gemm_int8_dot_m8, 8)
GEMM_DOT(gemm_int8_dot_m16, 16)
GEMM_DOT(gemm_int8_dot_wide, 32)

KERNELS(EXPORT_ROWS(gemm_int8_dot))
