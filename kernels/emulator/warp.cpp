// What the lanes of a warp do together. The last lane to arrive computes for all.

#include <immintrin.h>

#include <cstring>

#include "launch.hpp"

namespace emulator {

namespace {

struct Exchange {
    uint32_t value, result;
    int from;
};

struct Vote {
    bool predicate;
    uint32_t result;
};

struct MatrixLoad {
    const void* row;
    uint32_t* registers;
    uint32_t site;
};

struct Multiply {
    void* d;
    const uint32_t *a, *b;
};

}  // namespace

void exchange(uint32_t mask, uint32_t* value, int from, Place place) {
    Fiber& f = fiber();
    Exchange mine{*value, 0, from};
    running->meet(f, mask, Operation::Exchange, &mine, place, [&](Meeting& m) {
        for (uint32_t left = m.mask; left; left &= left - 1) {
            Exchange& to = *static_cast<Exchange*>(m.arguments[__builtin_ctz(left)]);
            if (!(m.mask >> to.from & 1)) {
                running->finding(&f, {"SHUFFLE-INACTIVE", describe(place), 0, 0,
                                      "lane " + std::to_string(__builtin_ctz(left)) + " asks lane " +
                                          std::to_string(to.from) + ", which is not in the mask",
                                      ""});
                to.result = 0xffffffff;
                continue;
            }
            to.result = static_cast<const Exchange*>(m.arguments[to.from])->value;
        }
    });
    *value = mine.result;
}

uint32_t vote(uint32_t mask, bool predicate, Place place) {
    Vote mine{predicate, 0};
    running->meet(fiber(), mask, Operation::Vote, &mine, place, [](Meeting& m) {
        uint32_t yes = 0;
        for (uint32_t left = m.mask; left; left &= left - 1)
            if (static_cast<const Vote*>(m.arguments[__builtin_ctz(left)])->predicate) yes |= left & -left;
        for (uint32_t left = m.mask; left; left &= left - 1)
            static_cast<Vote*>(m.arguments[__builtin_ctz(left)])->result = yes;
    });
    return mine.result;
}

void matrix_load(uint32_t* registers, const void* row, int count, bool transposed, Place place) {
    Fiber& f = fiber();
    MatrixLoad mine{row, registers, site_of(__builtin_return_address(0))};
    running->meet(f, ~0u, Operation::MatrixLoad, &mine, place, [&](Meeting& m) {
        for (int matrix = 0; matrix < count; matrix++) {
            uint16_t values[8][8];
            for (int r = 0; r < 8; r++) {
                const int lane = matrix * 8 + r;
                const auto& from = *static_cast<const MatrixLoad*>(m.arguments[lane]);
                Fiber& owner = *f.owner->fibers[size_t(f.warp) * 32 + size_t(lane)];
                const size_t at = size_t(static_cast<const char*>(from.row) - f.owner->shared);
                if (running->checked()) running->access(owner, from.row, 16, false, false, Cache::L2, from.site);
                if (at > Memory::SHARED_SLOT - 16) {
                    running->finding(&owner, {"OUT-OF-BOUNDS", describe(place), 0, 0,
                                              "ldmatrix of an address outside of the block's shared memory", ""});
                    running->abort(f);
                }
                memcpy(values[r], from.row, 16);
            }
            for (int lane = 0; lane < 32; lane++) {
                const int g = lane / 4, t = lane % 4 * 2;
                const uint16_t low = transposed ? values[t][g] : values[g][t],
                               high = transposed ? values[t + 1][g] : values[g][t + 1];
                static_cast<const MatrixLoad*>(m.arguments[lane])->registers[matrix] = low | uint32_t(high) << 16;
            }
        }
    });
}

static __m256 widen(const uint16_t* v, Operand operand) {
    const __m128i bits = _mm_load_si128(reinterpret_cast<const __m128i*>(v));
    if (operand == Operand::F16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// d += a b, k in ascending order, one rounding a step. The GPU's own order is not documented: bits agree between
// launches here, and between launches there, not between the two.
void multiply(float* d, const uint32_t* a, const uint32_t* b, Operand operand, Place place) {
    Multiply mine{d, a, b};
    running->meet(fiber(), ~0u, Operation::Multiply, &mine, place, [&](Meeting& m) {
        running->counts.products++;
        alignas(32) uint16_t weights[16][16], inputs[16][8];
        alignas(32) float wide[16][16];
        alignas(32) float sums[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const auto& x = *static_cast<const Multiply*>(m.arguments[lane]);
            const int g = lane / 4, t = lane % 4 * 2;
            memcpy(&weights[g][t], &x.a[0], 4);
            memcpy(&weights[g + 8][t], &x.a[1], 4);
            memcpy(&weights[g][t + 8], &x.a[2], 4);
            memcpy(&weights[g + 8][t + 8], &x.a[3], 4);
            for (int half = 0; half < 2; half++) {
                inputs[t + 8 * half][g] = uint16_t(x.b[half]);
                inputs[t + 8 * half + 1][g] = uint16_t(x.b[half] >> 16);
            }
            memcpy(&sums[g][t], x.d, 8);
            memcpy(&sums[g + 8][t], static_cast<const float*>(x.d) + 2, 8);
        }
        __m256 columns[16];
        for (int k = 0; k < 16; k++) columns[k] = widen(inputs[k], operand);
        for (int r = 0; r < 16; r++) {
            _mm256_store_ps(wide[r], widen(weights[r], operand));
            _mm256_store_ps(wide[r] + 8, widen(weights[r] + 8, operand));
        }
        // Four rows at a time, since one sum waits for itself.
        for (int r = 0; r < 16; r += 4) {
            __m256 s0 = _mm256_load_ps(sums[r]), s1 = _mm256_load_ps(sums[r + 1]), s2 = _mm256_load_ps(sums[r + 2]),
                   s3 = _mm256_load_ps(sums[r + 3]);
            for (int k = 0; k < 16; k++) {
                s0 = _mm256_fmadd_ps(_mm256_broadcast_ss(&wide[r][k]), columns[k], s0);
                s1 = _mm256_fmadd_ps(_mm256_broadcast_ss(&wide[r + 1][k]), columns[k], s1);
                s2 = _mm256_fmadd_ps(_mm256_broadcast_ss(&wide[r + 2][k]), columns[k], s2);
                s3 = _mm256_fmadd_ps(_mm256_broadcast_ss(&wide[r + 3][k]), columns[k], s3);
            }
            _mm256_store_ps(sums[r], s0);
            _mm256_store_ps(sums[r + 1], s1);
            _mm256_store_ps(sums[r + 2], s2);
            _mm256_store_ps(sums[r + 3], s3);
        }
        for (int lane = 0; lane < 32; lane++) {
            auto* out = static_cast<float*>(static_cast<const Multiply*>(m.arguments[lane])->d);
            const int g = lane / 4, t = lane % 4 * 2;
            memcpy(out, &sums[g][t], 8);
            memcpy(out + 2, &sums[g + 8][t], 8);
        }
    });
}

void multiply_s8(int32_t* d, const uint32_t* a, const uint32_t* b, Place place) {
    Multiply mine{d, a, b};
    running->meet(fiber(), ~0u, Operation::Multiply, &mine, place, [&](Meeting& m) {
        running->counts.products++;
        int8_t weights[16][32], inputs[8][32];
        for (int lane = 0; lane < 32; lane++) {
            const auto& x = *static_cast<const Multiply*>(m.arguments[lane]);
            const int g = lane / 4, t = lane % 4 * 4;
            memcpy(&weights[g][t], &x.a[0], 4);
            memcpy(&weights[g + 8][t], &x.a[1], 4);
            memcpy(&weights[g][t + 16], &x.a[2], 4);
            memcpy(&weights[g + 8][t + 16], &x.a[3], 4);
            memcpy(&inputs[g][t], &x.b[0], 4);
            memcpy(&inputs[g][t + 16], &x.b[1], 4);
        }
        const auto dot = [&](int row, int column) {
            int32_t sum = 0;
            for (int k = 0; k < 32; k++) sum += int32_t(weights[row][k]) * int32_t(inputs[column][k]);
            return uint32_t(sum);
        };
        for (int lane = 0; lane < 32; lane++) {
            auto* out = static_cast<int32_t*>(static_cast<const Multiply*>(m.arguments[lane])->d);
            const int g = lane / 4, t = lane % 4 * 2;
            // Sums wrap, as the instruction's do without .satfinite.
            for (int i = 0; i < 4; i++) out[i] = int32_t(uint32_t(out[i]) + dot(g + i / 2 * 8, t + i % 2));
        }
    });
}

}  // namespace emulator
