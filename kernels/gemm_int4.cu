// y[rows, n] = x[rows, k] w[n, k]^T for 1 to 16 rows: int4 weights with bf16 scales, bf16 inputs, f32 sums.
//
// Weights are the m16 operand and the rows the n8 operand of mma.m16n8k16: one row costs what eight do, and no slot is padding at eight.
// A row is a column of the product, and columns do not meet: its bits depend neither on the other rows nor on their number.
//
// Work is cut into items: 64 channels x one segment of k. How k is cut is a constant of the shape (kernels::schedule), and so is the order
// of every sum; a launch only deals items to blocks:
//   16 k      one mma, on top of the group's sum
//   group     scaled and added to the half's sum, k ascending; without groups, every 128 k, unscaled
//   half      even and odd blocks of 128 k, added at the end of the segment
//   segment   added in index order by the block that finishes a column last
//
// Weights, scales and inputs of 256 k at a time (a unit) run through a ring of cp.async stages that never drains between items: 48 KiB of
// weights are on their way at eight rows, 32 KiB at sixteen. The layout of weights and scales is kernels::layout::Int4Tiles, version 1.
#include "ptx.cuh"

namespace {

constexpr int CHANNELS = 64, UNIT = 256, THREADS = 256;

// Bytes of shared memory, in this order. `GROUP` inputs share a scale; 0: all inputs of a channel.
template <int ROWS, int GROUP>
struct Stage {
    static constexpr int COUNT = ROWS == 8 ? 7 : 5;
    static constexpr int WEIGHTS = CHANNELS * UNIT / 2;
    static constexpr int SCALES = GROUP ? UNIT / (GROUP ? GROUP : 1) * CHANNELS * 2 : 0;
    static constexpr int INPUTS = ROWS * UNIT * 2;
    static constexpr int BYTES = WEIGHTS + SCALES + INPUTS;
};

// Eight int4 weights as the four registers of mma's first operand. `q` holds nibble i and i + 4 of register i, offset by 8.
DEVICE void expand(uint32_t q, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The exponent of 128 over a nibble is 128 + nibble; 136 less is the weight, exact in bf16.
        const uint32_t biased = lop3<(0xf0 & 0xcc) | 0xaa>(q >> (4 * i), 0x000f000fu, 0x43004300u);
        a[i] = bf16x2_fma(biased, 0x3f803f80u, 0xc308c308u);
    }
}

template <int ROWS, int GROUP>
DEVICE void gemm(const uint4* weights, const uint16_t* scales, const uint16_t* x, float* y, float* partial,
                 uint32_t* counters, int rows, int n, int k, int segments) {
    using S = Stage<ROWS, GROUP>;
    constexpr int TILES = ROWS / 8;
    DYN_SMEM(unsigned char, shared);
    float* const halves = reinterpret_cast<float*>(shared + S::COUNT * S::BYTES);            // [64, ROWS]
    uint32_t* const last = reinterpret_cast<uint32_t*>(halves + CHANNELS * ROWS);            // one word

    const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int channels_of = warp % 4, half = warp / 4, g = lane / 4, t = lane % 4;
    const int columns = (n + CHANNELS - 1) / CHANNELS, units = (k + UNIT - 1) / UNIT, run = units / segments;
    const long long items = (long long)columns * segments;
    const int first = int(items * blockIdx.x / gridDim.x), end = int(items * (blockIdx.x + 1) / gridDim.x);
    const int steps = (end - first) * run;

    // What comes in next: unit `fetch_unit` of item `fetch_item`.
    int fetch_item = first, fetch_unit = 0, fetch_stage = 0;
    const auto fetch = [&]() {
        if (fetch_item < end) {
            const int column = fetch_item / segments, unit = fetch_item % segments * run + fetch_unit;
            unsigned char* const to = shared + fetch_stage * S::BYTES;
            const size_t at = size_t(column) * size_t(units) + size_t(unit);
            const uint4* const from = weights + at * (S::WEIGHTS / 16);
#pragma unroll
            for (int i = thread; i < S::WEIGHTS / 16; i += THREADS) cp_async16_once(to + i * 16, from + i);
            if (thread < S::SCALES / 16)
                cp_async16_once(to + S::WEIGHTS + thread * 16, scales + at * (S::SCALES / 2) + thread * 8);
            // 32 pieces of 8 inputs a row; the piece's place is turned by its row, so that ldmatrix meets each bank once.
#pragma unroll
            for (int i = thread; i < ROWS * 32; i += THREADS) {
                const int row = i / 32, piece = i % 32, input = unit * UNIT + piece * 8;
                const bool valid = row < rows && input < k;
                cp_async16_or_zero(to + S::WEIGHTS + S::SCALES + (row * 32 + (piece ^ (row & 7))) * 16,
                                   x + (valid ? size_t(row) * size_t(k) + size_t(input) : 0), valid);
            }
            fetch_stage = fetch_stage + 1 == S::COUNT ? 0 : fetch_stage + 1;
            if (++fetch_unit == run) {
                fetch_unit = 0;
                fetch_item++;
            }
        }
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < S::COUNT - 1; i++) fetch();

    float total[TILES][4] = {};
    int item = first, unit = 0, stage = 0;
    for (int step = 0; step < steps; step++) {
        cp_async_wait<S::COUNT - 2>();
        sync_threads();
        fetch();

        const unsigned char* const from = shared + stage * S::BYTES;
        const uint4* const mine = reinterpret_cast<const uint4*>(from) + (half * 4 + channels_of) * 64 + lane;
        const uint4 low = mine[0], high = mine[32];
        const uint32_t q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const uint16_t* const scale = reinterpret_cast<const uint16_t*>(from + S::WEIGHTS) + channels_of * 16 + g;
        const unsigned char* const inputs = from + S::WEIGHTS + S::SCALES;
        float sum[TILES][4] = {};
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t b[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int row = tile * 8 + lane % 8, piece = half * 16 + pair * 4 + lane / 8;
                ldmatrix_x4(b[tile], inputs + (row * 32 + (piece ^ (row & 7))) * 16);
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
                uint32_t a[4];
                expand(q[pair * 2 + s], a);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint32_t column[2] = {b[tile][s * 2], b[tile][s * 2 + 1]};
                    mma_bf16(sum[tile], a, column);
                }
            }
            // The end of a group, or of the 128 k that are folded without one.
            constexpr int FOLD = GROUP ? GROUP : 128;
            const int done = (pair + 1) * 32;
            if (done % FOLD == 0) {
                float upper = 1.0f, lower = 1.0f;
                if (GROUP) {
                    const int group = (half * 128 + done) / FOLD - 1;
                    upper = bf16_to_f32(scale[group * CHANNELS]);
                    lower = bf16_to_f32(scale[group * CHANNELS + 8]);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total[tile][i] = fmaf(i < 2 ? upper : lower, sum[tile][i], total[tile][i]);
                        sum[tile][i] = 0.0f;
                    }
            }
        }
        stage = stage + 1 == S::COUNT ? 0 : stage + 1;
        if (++unit < run) continue;

        // The segment is complete: the halves meet.
        unit = 0;
        const int column = item / segments, segment = item % segments;
        item++;
        const auto place = [&](int tile, int i) { return (channels_of * 16 + g + i / 2 * 8) * ROWS + tile * 8 + t * 2 + i % 2; };
        if (half)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) halves[place(tile, i)] = total[tile][i];
        sync_threads();
        if (!half)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int channel = column * CHANNELS + channels_of * 16 + g + i / 2 * 8, row = tile * 8 + t * 2 + i % 2;
                    float v = total[tile][i] + halves[place(tile, i)];
                    if (!GROUP) v *= bf16_to_f32(ld_nc(scales + channel));
                    if (row >= rows || channel >= n) continue;
                    if (segments == 1) y[size_t(row) * size_t(n) + size_t(channel)] = v;
                    else partial[(size_t(segment) * ROWS + size_t(row)) * size_t(n) + size_t(channel)] = v;
                }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[tile][i] = 0.0f;
        if (segments == 1) continue;

        sync_threads();
        if (thread == 0) {
            fence_gpu();
            *last = atomic_add(counters + column, 1u) == uint32_t(segments) - 1;
            fence_gpu();
        }
        sync_threads();
        if (!*last) continue;
        for (int i = thread; i < rows * CHANNELS; i += THREADS) {
            const int row = i / CHANNELS, channel = column * CHANNELS + i % CHANNELS;
            if (channel >= n) continue;
            const float* const p = partial + size_t(row) * size_t(n) + size_t(channel);
            float v = ld_cg(p);
            for (int s = 1; s < segments; s++) v += ld_cg(p + size_t(s) * ROWS * size_t(n));
            y[size_t(row) * size_t(n) + size_t(channel)] = v;
        }
        if (thread == 0) counters[column] = 0;
    }
    cp_async_wait<0>();
}

}  // namespace

#define GEMM(NAME, ROWS, GROUP)                                                                                   \
    KERNEL(NAME, THREADS)(const uint4* weights, const uint16_t* scales, const uint16_t* x, float* y, float* partial, \
                          uint32_t* counters, int rows, int n, int k, int segments) {                             \
        gemm<ROWS, GROUP>(weights, scales, x, y, partial, counters, rows, n, k, segments);                        \
    }

GEMM(gemm_int4_g32_m8, 8, 32)
GEMM(gemm_int4_g64_m8, 8, 64)
GEMM(gemm_int4_g128_m8, 8, 128)
GEMM(gemm_int4_channel_m8, 8, 0)
GEMM(gemm_int4_g32_m16, 16, 32)
GEMM(gemm_int4_g64_m16, 16, 64)
GEMM(gemm_int4_g128_m16, 16, 128)
GEMM(gemm_int4_channel_m16, 16, 0)

KERNELS(EXPORT(gemm_int4_g32_m8), EXPORT(gemm_int4_g64_m8), EXPORT(gemm_int4_g128_m8), EXPORT(gemm_int4_channel_m8),
        EXPORT(gemm_int4_g32_m16), EXPORT(gemm_int4_g64_m16), EXPORT(gemm_int4_g128_m16), EXPORT(gemm_int4_channel_m16))
