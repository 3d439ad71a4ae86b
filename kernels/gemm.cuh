// y[rows, n] = x[rows, k] w[n, k]^T, with what stands before and behind a product of a decoder layer. One template for every format of
// weights (formats.cuh) and every number of rows: 1 to 8, 9 to 16, and blocks of 32 for more.
//
// Weights are the m16 operand and the rows the n8 operand of mma: one row costs what eight do, and no slot is padding at eight. A row is a
// column of the product, and columns do not meet: its bits depend neither on the other rows nor on their number.
//
// Work is cut into items: 64 channels x one segment of k. How k is cut is a constant of shape and format (kernels::schedule), and so is
// the order of every sum; a launch only deals items to blocks:
//   16 k      one mma, on top of the group's sum
//   group     scaled and added to the half's sum, k ascending; without groups, every 128 k (bf16: 64), unscaled
//   half      the lower and the upper half of every unit, added at the end of the segment
//   segment   added in index order by the block that finishes a column last; from 17 rows on, by the one block that has the column
// Integers are summed exactly, in any order.
//
// Weights, scales and inputs of a unit of k run through a ring of cp.async stages that never drains between items and takes all of the
// shared memory: at least 40 KiB of weights and scales are on their way at eight rows, 24 KiB at sixteen.
//
// Inputs are bf16 (or f16, or s8) rows, or a residual stream that a norm and a sum lie in front of (struct Residual). A norm's factor is one number
// a row, so it is left out of the operands and multiplied into the product; its sum of squares is gathered while operands are made.
#pragma once
#include "decide.cuh"
#include "formats.cuh"
#include "rows.cuh"

namespace {

constexpr int CHANNELS = 64, THREADS = 256, SHARED = 99 * 1024;
// Floats between the rows of a finished tile, so that writing it meets each bank once.
constexpr int PITCH = CHANNELS + 4;
// Items whose sums of squares are kept: more than a ring has stages.
constexpr int SLOTS = 16;

// Bytes of shared memory: stages, in this order; behind them what Shared lists. `GROUP` inputs share a scale; 0: all of a channel.
template <class F, int ROWS, int GROUP>
struct Stage {
    static constexpr int WEIGHTS = F::TILE;
    static constexpr int SCALES = GROUP ? F::UNIT / (GROUP ? GROUP : 1) * CHANNELS * 2 : 0;
    static constexpr int INPUTS = ROWS * F::PIECES * 16;
    static constexpr int BYTES = WEIGHTS + SCALES + INPUTS;
    static constexpr int REST = (ROWS * PITCH + SLOTS * ROWS + 2 * ROWS) * 4 + 16;
    static constexpr int COUNT = (SHARED - REST) / BYTES;
    static_assert((COUNT - 1) * (WEIGHTS + SCALES) >= (ROWS == 8 ? 40 : ROWS == 16 ? 24 : 1) * 1024, "too few bytes on their way");
    static_assert(COUNT >= 2 && COUNT < SLOTS, "a ring of an unforeseen length");
};

// What a residual stream goes through before it is multiplied: stream = (stream + norm(delta) * post_norm) * scalar, operands = stream *
// norm. `squares` are the sums that the product which made delta left behind (Epilogue::SQUARES).
struct Residual {
    const float* stream;        // [rows, k]; null: inputs are rows of operands
    const float* delta;         // [rows, k]; null: nothing is added
    const float* squares;       // [rows, k / 64 rounded up]
    const uint16_t* post_norm;  // bf16 [k]
    const uint16_t* norm;       // bf16 [k]; null: operands are the stream itself
    float* out;                 // [rows, k]: the stream that comes out
    float scalar, eps;
};

// What becomes of a finished product.
enum Epilogue {
    STORE,    // f32 [rows, n]
    SQUARES,  // the same, and for every row and column of 64 channels the sum of squares
    GATED,    // operands [rows, n / 2]: gelu(gate) * up; of every 16 channels the first 8 are gates, the others their ups
    SCALED,   // operands [rows, n]: gelu(y) * factor
    HEADS,    // f32 [rows, n], and each head, once all of its columns are there, norms and turns it and appends it (rows.cuh)
    BEST,     // nothing but the best token of each row so far (decide.cuh)
};
// Beside GATED and SCALED: operands are f16, not bf16, as the product that follows takes them.
constexpr int HALVES = 8;
struct Best {
    const uint32_t* ids;  // [n]: tokens of the channels; null: their numbers
    uint64_t* best;       // [rows]: largest ranks
    uint32_t* state;      // decide::State, of which BAD is set
    float cap;
};
struct Output {
    void* y;
    float* squares;       // [rows, n / 64 rounded up]
    const float* factor;  // [rows, factor_stride]
    int factor_stride, epilogue;
    rows::Heads heads = {};
    Best best = {};
};

struct Shape {
    int rows, n, k, segments;
};

// The tanh form, as a sigmoid.
DEVICE float gelu(float x) {
    const float u = x * fmaf(0.044715f * x, x, 1.0f);
    return x / (1.0f + ex2(u * (-2.0f * 0.7978845608028654f * 1.4426950408889634f)));
}

DEVICE uint16_t operand(float v, bool halves) {
    return uint16_t(halves ? f16x2(v, 0.0f) : bf16x2(v, 0.0f));
}

// Every block waits for all others of a cooperative launch, which are gridDim.y, and sees what they wrote. `words` are how many have come
// and how often all have: the last to come resets the first and raises the second, so that the next launch finds them as this one did.
DEVICE void grid_barrier(uint32_t* words) {
    sync_threads();
    if (threadIdx.x == 0) {
        const uint32_t round = ld_acquire(words + 1);
        if (atomic_add_acq_rel(words, 1u) == gridDim.y - 1) {
            words[0] = 0;
            st_release(words + 1, round + 1);
        } else {
            while (ld_acquire(words + 1) == round) pause(20);
        }
    }
    sync_threads();
}

// `x_scale` is f32 [rows] where inputs are integers. `counters` are a word a column and, where heads are finished, one a head behind them.
// With a `barrier`, inputs are what all blocks write before it: PAIRED kernels have one in front of their second product.
template <class F, int ROWS, int GROUP, bool PAIRED = false>
DEVICE void gemm(const uint4* weights, const uint16_t* scales, const void* x, const float* x_scale, const Residual residual,
                 const Output output, typename F::Sum* partial, uint32_t* counters, const Shape shape, uint32_t* barrier = nullptr) {
    const int epilogue = output.epilogue & ~HALVES;
    const bool halves = output.epilogue & HALVES;
    // Epilogues of decode steps.
    constexpr bool STEP = ROWS <= 16 && !F::INTEGER && !PAIRED;
    using S = Stage<F, ROWS, GROUP>;
    using Sum = typename F::Sum;
    constexpr int TILES = ROWS / 8, PIECES = F::PIECES, PAIRS = PIECES / 8, PASSES = (ROWS * PIECES + THREADS - 1) / THREADS;
    DYN_SMEM(unsigned char, shared);
    Sum* const finished = reinterpret_cast<Sum*>(shared + S::COUNT * S::BYTES);      // [ROWS, PITCH]
    float* const slots = reinterpret_cast<float*>(finished + ROWS * PITCH);          // [SLOTS, ROWS]: sums of squares of an item's inputs
    float* const row_squares = slots + SLOTS * ROWS;                                 // [ROWS]: of all k
    float* const post_scale = row_squares + ROWS;                                    // [ROWS]: what delta is normed with
    uint32_t* const last = reinterpret_cast<uint32_t*>(post_scale + ROWS);           // one word

    const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int channels_of = warp % 4, half = warp / 4, g = lane / 4, t = lane % 4;
    const int n = shape.n, k = shape.k, segments = shape.segments;
    const int first_row = int(blockIdx.x) * ROWS, rows = min(ROWS, shape.rows - first_row);
    const int columns = (n + CHANNELS - 1) / CHANNELS, units = (k + F::UNIT - 1) / F::UNIT, run = units / segments;
    // From 17 rows on, a block has whole columns.
    const bool whole = ROWS > 16 || segments == 1;
    const int together = ROWS > 16 ? segments : 1;
    const long long shares = (long long)columns * segments / together;
    const int first = int(shares * blockIdx.y / gridDim.y) * together, end = int(shares * (blockIdx.y + 1) / gridDim.y) * together;
    const int steps = (end - first) * run;

    struct Cursor {
        int item, unit, stage;
    };
    const auto advance = [&](Cursor& c) {
        c.stage = c.stage + 1 == S::COUNT ? 0 : c.stage + 1;
        if (++c.unit == run) {
            c.unit = 0;
            c.item++;
        }
    };
    // Of 16 bytes of inputs, the place: turned by the row, so that ldmatrix meets each bank once.
    const auto piece_at = [](int row, int piece) { return (row * PIECES + (piece ^ (row & 7))) * 16; };
    constexpr int IN_PIECE = 16 / F::INPUT_BYTES;

    // Weights and scales of a unit, and its inputs where they are operands already.
    const auto fetch_weights = [&](const Cursor& c) {
        const int column = c.item / segments, unit = c.item % segments * run + c.unit;
        unsigned char* const to = shared + c.stage * S::BYTES;
        const size_t at = size_t(column) * size_t(units) + size_t(unit);
        const uint4* const from = weights + at * (S::WEIGHTS / 16);
#pragma unroll
        for (int i = thread; i < S::WEIGHTS / 16; i += THREADS) cp_async16_once(to + i * 16, from + i);
        if (thread < S::SCALES / 16)
            cp_async16_once(to + S::WEIGHTS + thread * 16, scales + at * (S::SCALES / 2) + thread * 8);
    };
    const auto fetch_inputs = [&](const Cursor& c) {
        if (residual.stream) return;
        const int unit = c.item % segments * run + c.unit;
        unsigned char* const to = shared + c.stage * S::BYTES + S::WEIGHTS + S::SCALES;
#pragma unroll
        for (int i = thread; i < ROWS * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES, input = unit * F::UNIT + piece * IN_PIECE;
            const bool valid = row < rows && input < k;
            const size_t place = valid ? (size_t(first_row + row) * size_t(k) + size_t(input)) * F::INPUT_BYTES : 0;
            cp_async16_or_zero(to + piece_at(row, piece), static_cast<const unsigned char*>(x) + place, valid);
        }
    };
    Cursor fetched = {first, 0, 0};
    const auto fetch = [&]() {
        if (fetched.item < end) {
            fetch_weights(fetched);
            fetch_inputs(fetched);
            advance(fetched);
        }
        cp_async_commit();
    };

    // Operands of the next unit, made of the residual stream.
    Cursor formed = {first, 0, 0};
    float squares[PASSES] = {};
    const auto form = [&]() {
        if (formed.item >= end) return;
        const int unit = formed.item % segments * run + formed.unit;
        unsigned char* const to = shared + formed.stage * S::BYTES + S::WEIGHTS + S::SCALES;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int i = thread + pass * THREADS, row = i / PIECES, piece = i % PIECES, input = unit * F::UNIT + piece * 8;
            if (i >= ROWS * PIECES) break;
            uint32_t operands[4] = {};
            if (row < rows && input < k) {
                const size_t place = size_t(first_row + row) * size_t(k) + size_t(input);
                const float4* const stream = reinterpret_cast<const float4*>(residual.stream + place);
                const float4 low = ld_nc(stream), high = ld_nc(stream + 1);
                float h[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                if (residual.delta) {
                    const float4* const delta = reinterpret_cast<const float4*>(residual.delta + place);
                    const float4 low = ld_nc(delta), high = ld_nc(delta + 1);
                    const float d[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                    const uint4 w = ld_nc(reinterpret_cast<const uint4*>(residual.post_norm + input));
                    const uint32_t norm[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float weight = bf16_to_f32(norm[j / 2] >> (16 * (j % 2)) & 0xffffu);
                        h[j] = fmaf(d[j] * post_scale[row], weight, h[j]) * residual.scalar;
                    }
                }
                if (residual.out && formed.item < segments) {
                    float4* const out = reinterpret_cast<float4*>(residual.out + place);
                    out[0] = make_float4(h[0], h[1], h[2], h[3]);
                    out[1] = make_float4(h[4], h[5], h[6], h[7]);
                }
                if (residual.norm) {
                    const uint4 w = ld_nc(reinterpret_cast<const uint4*>(residual.norm + input));
                    const uint32_t norm[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        squares[pass] = fmaf(h[j], h[j], squares[pass]);
                        h[j] *= bf16_to_f32(norm[j / 2] >> (16 * (j % 2)) & 0xffffu);
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if constexpr (!F::INTEGER) operands[j] = F::pack(h[2 * j], h[2 * j + 1]);
            }
            *reinterpret_cast<uint4*>(to + piece_at(row, piece)) = make_uint4(operands[0], operands[1], operands[2], operands[3]);
            if (formed.unit + 1 < run) continue;
            // The item's last unit: lanes of a row meet in a fixed tree.
            float sum = squares[pass];
#pragma unroll
            for (int lanes = PIECES / 2; lanes; lanes /= 2) sum += shuffle_xor(sum, lanes);
            if (piece == 0) slots[formed.item % SLOTS * ROWS + row] = sum;
            squares[pass] = 0.0f;
        }
        advance(formed);
    };

    // The ring is filled before anything of the stream is waited for, with weights before the product in front is.
    if (PAIRED && barrier) {
        Cursor ahead = fetched;
        for (int i = 0; i < S::COUNT - 1 && ahead.item < end; i++) {
            fetch_weights(ahead);
            advance(ahead);
        }
        grid_barrier(barrier);
        for (int i = 0; i < S::COUNT - 1; i++) {
            if (fetched.item < end) {
                fetch_inputs(fetched);
                advance(fetched);
            }
            cp_async_commit();
        }
    } else {
#pragma unroll
        for (int i = 0; i < S::COUNT - 1; i++) fetch();
    }
    if (!F::INTEGER && residual.stream) {
        if (residual.delta) {
            if (thread < rows) {
                const int blocks = (k + CHANNELS - 1) / CHANNELS;
                const float* const from = residual.squares + size_t(first_row + thread) * size_t(blocks);
                float sum = ld_nc(from);
                for (int i = 1; i < blocks; i++) sum += ld_nc(from + i);
                post_scale[thread] = rsqrt(sum / float(k) + residual.eps);
            }
            sync_threads();
        }
        for (int i = 0; i < S::COUNT - 1; i++) form();
    }

    Sum total[TILES][4] = {}, held[TILES][4] = {};
    int item = first, unit = 0, stage = 0;
    for (int step = 0; step < steps; step++) {
        cp_async_wait<S::COUNT - 2>();
        sync_threads();
        fetch();
        if (!F::INTEGER && residual.stream) form();

        const unsigned char* const from = shared + stage * S::BYTES;
        uint32_t q[F::WORDS];
        F::load(from, half * 4 + channels_of, lane, q);
        const uint16_t* const scale = reinterpret_cast<const uint16_t*>(from + S::WEIGHTS) + channels_of * 16 + g;
        const unsigned char* const inputs = from + S::WEIGHTS + S::SCALES;
        Sum sum[TILES][4] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            uint32_t a[2][4];
            F::expand(q, pair * 2, a[0]);
            F::expand(q, pair * 2 + 1, a[1]);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                uint32_t b[4];
                ldmatrix_x4(b, inputs + piece_at(tile * 8 + lane % 8, half * (PIECES / 2) + pair * 4 + lane / 8));
                const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
                F::multiply(sum[tile], a[0], b0);
                F::multiply(sum[tile], a[1], b1);
            }
            // The end of a group, or of the inputs that are folded without one.
            constexpr int FOLD = GROUP ? GROUP : 128;
            const int done = (pair + 1) * 2 * F::PRODUCT;
            if (done % FOLD == 0 || pair + 1 == PAIRS) {
                float upper = 1.0f, lower = 1.0f;
                if (GROUP) {
                    const int group = (half * (F::UNIT / 2) + done) / FOLD - 1;
                    upper = bf16_to_f32(scale[group * CHANNELS]);
                    lower = bf16_to_f32(scale[group * CHANNELS + 8]);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if constexpr (F::INTEGER) total[tile][i] += sum[tile][i];
                        else total[tile][i] = fmaf(i < 2 ? upper : lower, sum[tile][i], total[tile][i]);
                        sum[tile][i] = 0;
                    }
            }
        }
        stage = stage + 1 == S::COUNT ? 0 : stage + 1;
        if (++unit < run) continue;

        // The segment is complete: the halves meet.
        unit = 0;
        const int column = item / segments, segment = item % segments;
        const auto place = [&](int tile, int i) { return (tile * 8 + t * 2 + i % 2) * PITCH + channels_of * 16 + g + i / 2 * 8; };
        if (half)
#pragma unroll
            for (int i = 0; i < TILES * 4; i++) finished[place(i / 4, i % 4)] = total[i / 4][i % 4];
        sync_threads();
        float* const partial_squares = reinterpret_cast<float*>(partial + size_t(segments) * ROWS * size_t(n));
        if (!half) {
#pragma unroll
            for (int i = 0; i < TILES * 4; i++) {
                const int channel = column * CHANNELS + channels_of * 16 + g + i % 4 / 2 * 8, row = i / 4 * 8 + t * 2 + i % 2;
                Sum v = total[i / 4][i % 4] + finished[place(i / 4, i % 4)];
                if constexpr (!GROUP && !F::INTEGER && F::SCALED) v *= bf16_to_f32(ld_nc(scales + channel));
                if (whole) {
                    if (segment) v = held[i / 4][i % 4] + v;
                    held[i / 4][i % 4] = v;
                    finished[place(i / 4, i % 4)] = v;
                } else if (row < rows && channel < n) {
                    partial[(size_t(segment) * ROWS + size_t(row)) * size_t(n) + size_t(channel)] = v;
                }
            }
        } else if (residual.norm && thread - THREADS / 2 < rows) {
            const int row = thread - THREADS / 2;
            const float v = slots[item % SLOTS * ROWS + row];
            if (whole) row_squares[row] = segment ? row_squares[row] + v : v;
            else partial_squares[(size_t(column) * size_t(segments) + size_t(segment)) * ROWS + size_t(row)] = v;
        }
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) total[i / 4][i % 4] = 0;
        item++;
        if (whole && segment + 1 < segments) continue;

        sync_threads();
        if (!whole) {
            if (thread == 0) {
                fence_gpu();
                *last = atomic_add(counters + column, 1u) == uint32_t(segments) - 1;
                fence_gpu();
            }
            sync_threads();
            if (!*last) continue;
        }

        // The column is complete: a warp a row.
        const bool gated = epilogue == GATED;
        for (int row = warp; row < rows; row += THREADS / 32) {
            const size_t line = size_t(first_row + row);
            float factor = 1.0f, v[2];
            if (residual.norm) {
                float sum;
                if (whole) {
                    sum = row_squares[row];
                } else {
                    const float* const p = partial_squares + size_t(column) * size_t(segments) * ROWS + size_t(row);
                    sum = ld_cg(p);
                    for (int s = 1; s < segments; s++) sum += ld_cg(p + s * ROWS);
                }
                factor = rsqrt(sum / float(k) + residual.eps);
            }
            int channel[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int in_column = gated ? lane / 8 * 16 + i * 8 + lane % 8 : lane + i * 32;
                channel[i] = column * CHANNELS + in_column;
                Sum sum = 0;
                if (whole) {
                    sum = finished[row * PITCH + in_column];
                } else if (channel[i] < n) {
                    const Sum* const p = partial + size_t(row) * size_t(n) + size_t(channel[i]);
                    sum = ld_cg(p);
                    for (int s = 1; s < segments; s++) sum += ld_cg(p + size_t(s) * ROWS * size_t(n));
                }
                v[i] = float(sum) * factor;
                if constexpr (F::INTEGER) v[i] = v[i] * bf16_to_f32(ld_nc(scales + channel[i])) * ld_nc(x_scale + line);
            }
            if (gated) {
                if (channel[1] < n)
                    static_cast<uint16_t*>(output.y)[line * size_t(n / 2) + size_t(column * (CHANNELS / 2) + lane)] =
                        operand(gelu(v[0]) * v[1], halves);
                continue;
            }
            if (STEP && epilogue == BEST) {
                // As decide::best_token chooses among logits in memory.
                uint64_t mine = 0;
                bool bad = false;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (channel[i] >= n) continue;
                    const float logit = decide::capped(v[i], output.best.cap);
                    const uint32_t token = output.best.ids ? ld_nc(output.best.ids + channel[i]) : uint32_t(channel[i]);
                    bad |= logit != logit;
                    mine = max(mine, decide::rank(logit, token));
                }
#pragma unroll
                for (int lanes = 16; lanes; lanes /= 2) mine = max(mine, decide::shuffle_xor64(mine, lanes));
                if (bad) atomic_or(output.best.state + decide::BAD, 1u);
                if (lane == 0) atomic_max(output.best.best + line, mine);
                continue;
            }
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (channel[i] >= n) continue;
                const size_t at = line * size_t(n) + size_t(channel[i]);
                sum = fmaf(v[i], v[i], sum);
                if (epilogue == SCALED) {
                    const float by = ld_nc(output.factor + line * size_t(output.factor_stride) + size_t(channel[i]));
                    static_cast<uint16_t*>(output.y)[at] = operand(gelu(v[i]) * by, halves);
                } else {
                    static_cast<float*>(output.y)[at] = v[i];
                }
            }
            if (epilogue != SQUARES) continue;
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) sum += shuffle_xor(sum, lanes);
            if (lane == 0) output.squares[line * size_t(columns) + size_t(column)] = sum;
        }
        if (!whole && thread == 0) counters[column] = 0;
        if (STEP && epilogue == HEADS) {
            // Heads that this column is the last part of. It has parts of four at most.
            const rows::Heads& h = output.heads;
            const int begin = column * CHANNELS / h.dim, parts = min(((column + 1) * CHANNELS - 1) / h.dim, n / h.dim - 1) - begin + 1;
            uint32_t* const of_heads = counters + columns + begin;
            sync_threads();
            if (thread == 0) {
                fence_gpu();
                uint32_t complete = 0;
                for (int i = 0; i < parts; i++) {
                    const int low = (begin + i) * h.dim / CHANNELS, high = ((begin + i + 1) * h.dim - 1) / CHANNELS;
                    if (atomic_add(of_heads + i, 1u) == uint32_t(high - low)) complete |= 1u << i;
                }
                fence_gpu();
                for (int i = 0; i < parts; i++)
                    if (complete >> i & 1) of_heads[i] = 0;
                *last = complete;
            }
            sync_threads();
            for (int i = warp; i < rows * parts; i += THREADS / 32)
                if (*last >> i % parts & 1) rows::place_head(h, static_cast<const float*>(output.y), i / parts, begin + i % parts);
        }
    }
    cp_async_wait<0>();
}

}  // namespace

#define GEMM(NAME, FORMAT, ROWS, GROUP)                                                                                              \
    KERNEL_ALONE(NAME, THREADS)(const uint4* weights, const uint16_t* scales, const uint16_t* x, const float* stream, const float* delta,  \
                          const float* delta_squares, const uint16_t* post_norm, const uint16_t* norm, float* stream_out,            \
                          float scalar, float eps, void* y, float* squares, const float* factor, int factor_stride, int epilogue,    \
                          float* partial, uint32_t* counters, int rows, int n, int k, int segments, const float* q_weight,           \
                          const float* k_weight, const float2* rotations, const int2* table, uint16_t* q, unsigned char* keys,       \
                          unsigned char* values, unsigned char* side_keys, unsigned char* side_values, int heads, int kv_heads,      \
                          int dim, int capacity, int positions, int pairs, int int8, float head_eps, const uint32_t* ids, uint64_t* best,               \
                          uint32_t* state, float cap) {                                                                              \
        gemm<FORMAT, ROWS, GROUP>(weights, scales, x, nullptr,                                                                       \
                                  {stream, delta, delta_squares, post_norm, norm, stream_out, scalar, eps},                          \
                                  {y, squares, factor, factor_stride, epilogue,                                                      \
                                   {q_weight, k_weight, rotations, table, q, keys, values, side_keys, side_values, heads, kv_heads,  \
                                    dim, capacity, positions, pairs, int8, head_eps},                                                      \
                                   {ids, best, state, cap}},                                                                         \
                                  partial, counters, {rows, n, k, segments});                                                        \
    }
#define GEMM_ROWS(FORMAT, NAME, GROUP_NAME, GROUP) \
    GEMM(gemm_##NAME##_##GROUP_NAME##_m8, FORMAT, 8, GROUP) \
    GEMM(gemm_##NAME##_##GROUP_NAME##_m16, FORMAT, 16, GROUP) \
    GEMM(gemm_##NAME##_##GROUP_NAME##_wide, FORMAT, 32, GROUP)
#define EXPORT_ROWS(NAME) EXPORT(NAME##_m8), EXPORT(NAME##_m16), EXPORT(NAME##_wide)

// All kernels of packed weights of one width.
#define GEMM_PACKED(FORMAT, NAME)          \
    GEMM_ROWS(FORMAT, NAME, g32, 32)       \
    GEMM_ROWS(FORMAT, NAME, g64, 64)       \
    GEMM_ROWS(FORMAT, NAME, g128, 128)     \
    GEMM_ROWS(FORMAT, NAME, channel, 0)    \
    KERNELS(EXPORT_ROWS(gemm_##NAME##_g32), EXPORT_ROWS(gemm_##NAME##_g64), EXPORT_ROWS(gemm_##NAME##_g128), \
            EXPORT_ROWS(gemm_##NAME##_channel))
