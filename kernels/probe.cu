// What a machine is asked before anything is claimed about it: does a product's row or column depend on its neighbours, how fast are reads
// and copies, what does a kernel boundary and a grid barrier cost. `kernels::selftest` launches them; no step of the decoder does.
#include "ptx.cuh"

namespace {

// Loads of one thread that are on their way together.
constexpr int AHEAD = 8;

DEVICE uint32_t sum(const uint4& v) {
    return v.x + v.y + v.z + v.w;
}

// d[16, 8] of block `tile` = sum over steps of a[16, K] b[K, 8], operands in the order in which the lanes hold them: of a four registers a
// lane, of b two, of d four.
template <class D, class Multiply>
DEVICE void products(const uint4* a, const uint2* b, D* d, int steps, Multiply multiply) {
    const size_t tile = blockIdx.x, lane = threadIdx.x;
    D sums[4] = {0, 0, 0, 0};
    for (int step = 0; step < steps; step++) {
        const size_t at = (tile * size_t(steps) + size_t(step)) * 32 + lane;
        const uint4 va = ld_nc(a + at);
        const uint2 vb = ld_nc(b + at);
        const uint32_t ra[4] = {va.x, va.y, va.z, va.w}, rb[2] = {vb.x, vb.y};
        multiply(sums, ra, rb);
    }
    for (size_t i = 0; i < 4; i++) d[(tile * 32 + lane) * 4 + i] = sums[i];
}

}  // namespace

KERNEL(probe_mma_f16, 32)(const uint4* a, const uint2* b, float* d, int steps) {
    products(a, b, d, steps, [](float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2]) { mma_f16(d, a, b); });
}

KERNEL(probe_mma_bf16, 32)(const uint4* a, const uint2* b, float* d, int steps) {
    products(a, b, d, steps, [](float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2]) { mma_bf16(d, a, b); });
}

KERNEL(probe_mma_s8, 32)(const uint4* a, const uint2* b, int32_t* d, int steps) {
    products(a, b, d, steps, [](int32_t(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2]) { mma_s8(d, a, b); });
}

// Word i of x = i * factor + seed: sums of it are known without reading it.
KERNEL(probe_pattern, 256)(uint4* x, uint64_t vectors, uint32_t factor, uint32_t seed) {
    const uint64_t stride = uint64_t(gridDim.x) * 256;
    for (uint64_t i = uint64_t(blockIdx.x) * 256 + threadIdx.x; i < vectors; i += stride) {
        const uint32_t first = uint32_t(i * 4) * factor + seed;
        x[i] = make_uint4(first, first + factor, first + 2 * factor, first + 3 * factor);
    }
}

// y[thread of the grid] += the sum of the words that it read. Added, so that a second launch that does nothing shows.
KERNEL(probe_read, 512)(const uint4* x, uint32_t* y, uint64_t vectors) {
    const uint64_t stride = uint64_t(gridDim.x) * 512, thread = uint64_t(blockIdx.x) * 512 + threadIdx.x;
    uint32_t total = 0;
    uint64_t i = thread;
    for (; i + (AHEAD - 1) * stride < vectors; i += AHEAD * stride) {
        uint4 v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) v[j] = ld_nc(x + i + uint64_t(j) * stride);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) total += sum(v[j]);
    }
    for (; i < vectors; i += stride) total += sum(ld_nc(x + i));
    y[thread] = ld_cg(y + thread) + total;
}

KERNEL(probe_copy, 512)(const uint4* x, uint4* y, uint64_t vectors) {
    const uint64_t stride = uint64_t(gridDim.x) * 512;
    uint64_t i = uint64_t(blockIdx.x) * 512 + threadIdx.x;
    for (; i + (AHEAD - 1) * stride < vectors; i += AHEAD * stride) {
        uint4 v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) v[j] = ld_nc(x + i + uint64_t(j) * stride);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) y[i + uint64_t(j) * stride] = v[j];
    }
    for (; i < vectors; i += stride) y[i] = ld_nc(x + i);
}

// As little as a kernel can do and still be seen to have run: y[block] += step.
KERNEL(probe_count, 256)(uint32_t* y, uint32_t step) {
    if (threadIdx.x == 0) y[blockIdx.x] = ld_cg(y + blockIdx.x) + step;
}

// `rounds` times: every block adds one to what its neighbour had, and all meet. state[2, blocks], barrier[3] zero; after it every block
// has `rounds` in state[rounds % 2]. A cooperative launch.
KERNEL(probe_barrier, 256)(uint32_t* state, uint32_t* barrier, int rounds) {
    const unsigned thread = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
    for (int round = 0; round < rounds; round++) {
        if (thread == 0) {
            const uint32_t* const from = state + size_t(round % 2) * blocks + (block + 1) % blocks;
            state[size_t((round + 1) % 2) * blocks + block] = round ? ld_cg(from) + 1 : 1;
        }
        sync_threads();
        if (thread == 0) {
            const uint32_t target = uint32_t(round) + 1;
            if (atomic_add_acq_rel(barrier, 1u) == blocks * target - 1) st_release(barrier + 1, target);
            while (ld_acquire(barrier + 1) < target) pause(20);
        }
        sync_threads();
    }
    // For the next launch; everyone has seen the last word before anyone passes the second barrier of the last round.
    if (thread == 0 && atomic_add_acq_rel(barrier + 2, 1u) == blocks - 1) {
        barrier[0] = 0;
        barrier[1] = 0;
        barrier[2] = 0;
    }
}

// ring[1..n] = x, then ring[0] = n: how the host is told without being waited for.
KERNEL(probe_post, 32)(const uint32_t* x, uint32_t* ring, uint32_t n) {
    for (uint32_t i = threadIdx.x; i < n; i += 32) ring[1 + i] = ld_nc(x + i);
    sync_warp();
    if (threadIdx.x == 0) {
        fence_system();
        ring[0] = n;
    }
}

KERNELS(EXPORT(probe_mma_f16), EXPORT(probe_mma_bf16), EXPORT(probe_mma_s8), EXPORT(probe_pattern), EXPORT(probe_read),
        EXPORT(probe_copy), EXPORT(probe_count), EXPORT(probe_barrier), EXPORT(probe_post))
