// Two products in one cooperative launch, the first one's outputs the second one's inputs, with a barrier of the grid in between: a layer's
// per-layer gate and projection, which are too small to be worth a launch each.
//
//   middle = gelu(stream' first^T) * factor, y = middle second^T and its sums of squares
//
// Both are the products of gemm.cuh, so that the bits are those of two launches. The second one's weights are on their way to the ring
// before a block waits at the barrier.
#pragma once
#include "gemm.cuh"

namespace {

// A mistake that the tests plant to see themselves fail; none in what is built for a GPU.
enum PlantedInPair { NO_MISTAKE, NO_GRID_BARRIER };

// Weights of one product, and how it is cut.
struct Side {
    const uint4* weights;
    const uint16_t* scales;
    int n, segments;
};

template <class F, int ROWS, int GROUP, int PLANTED = NO_MISTAKE>
DEVICE void pair(const Side first, const Side second, const Residual residual, const float* factor, int factor_stride, uint16_t* middle,
                 float* y, float* squares, float* partial, uint32_t* counters, uint32_t* barrier, int rows, int k) {
    // One body for both.
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        const bool behind = turn == 1;
        const Residual stream = {behind ? nullptr : residual.stream, behind ? nullptr : residual.delta, residual.squares, residual.post_norm,
                                 behind ? nullptr : residual.norm, residual.out, residual.scalar, residual.eps};
        const Output output = {behind ? static_cast<void*>(y) : middle, squares, factor, factor_stride, behind ? SQUARES : SCALED};
        const Shape shape = {rows, behind ? second.n : first.n, behind ? first.n : k, behind ? second.segments : first.segments};
        // What the ring held is used up by all threads.
        sync_threads();
        gemm<F, ROWS, GROUP, true>(behind ? second.weights : first.weights, behind ? second.scales : first.scales, middle, nullptr, stream,
                                   output, partial, counters, shape, behind && PLANTED != NO_GRID_BARRIER ? barrier : nullptr);
    }
}

}  // namespace

#define PAIR(NAME, FORMAT, ROWS, GROUP, PLANTED)                                                                                                 \
    KERNEL_ALONE(NAME, THREADS)(const uint4* weights, const uint16_t* scales, int n, int segments, const uint4* second_weights,         \
                                const uint16_t* second_scales, int second_n, int second_segments, const float* stream,                  \
                                const float* delta, const float* delta_squares, const uint16_t* post_norm, const uint16_t* norm,        \
                                float* stream_out, float scalar, float eps, const float* factor, int factor_stride, uint16_t* middle,   \
                                float* y, float* squares, float* partial, uint32_t* counters, uint32_t* barrier, int rows, int k) {     \
        pair<FORMAT, ROWS, GROUP, PLANTED>({weights, scales, n, segments}, {second_weights, second_scales, second_n, second_segments},           \
                                  {stream, delta, delta_squares, post_norm, norm, stream_out, scalar, eps}, factor, factor_stride,      \
                                  middle, y, squares, partial, counters, barrier, rows, k);                                             \
    }
#define PAIR_ROWS(FORMAT, NAME, GROUP_NAME, GROUP)            \
    PAIR(pair_##NAME##_##GROUP_NAME##_m8, FORMAT, 8, GROUP, NO_MISTAKE)   \
    PAIR(pair_##NAME##_##GROUP_NAME##_m16, FORMAT, 16, GROUP, NO_MISTAKE)
#define EXPORT_PAIR(NAME) EXPORT(NAME##_m8), EXPORT(NAME##_m16)

// All kernels of packed weights of one width.
#define PAIR_PACKED(FORMAT, NAME)          \
    PAIR_ROWS(FORMAT, NAME, g32, 32)       \
    PAIR_ROWS(FORMAT, NAME, g64, 64)       \
    PAIR_ROWS(FORMAT, NAME, g128, 128)     \
    PAIR_ROWS(FORMAT, NAME, channel, 0)    \
    KERNELS(EXPORT_PAIR(pair_##NAME##_g32), EXPORT_PAIR(pair_##NAME##_g64), EXPORT_PAIR(pair_##NAME##_g128), \
            EXPORT_PAIR(pair_##NAME##_channel))
