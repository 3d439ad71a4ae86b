// Formats of weights: how a lane reads its part of a tile from shared memory, and how it becomes the first operand of a matrix product. The
// tiles are those of kernels::layout, version 1.
//
// A unit is what a stage of the ring holds: 64 channels x UNIT inputs. A warp has 16 channels x half a unit; `part` counts them.
#pragma once
#include "ptx.cuh"

namespace {

// Words of a lane: CHUNKS times 16 bytes, 32 lanes of one chunk together.
template <int CHUNKS>
DEVICE void load_chunks(const unsigned char* tile, int part, int lane, uint32_t* q) {
    const uint4* const from = reinterpret_cast<const uint4*>(tile) + part * CHUNKS * 32 + lane;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const uint4 v = from[i * 32];
        q[4 * i] = v.x;
        q[4 * i + 1] = v.y;
        q[4 * i + 2] = v.z;
        q[4 * i + 3] = v.w;
    }
}

// Bits a & b | c.
DEVICE uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    return lop3<(0xf0 & 0xcc) | 0xaa>(a, b, c);
}

// bf16 operands and f32 sums: a product takes 16 inputs.
struct Float {
    typedef float Sum;
    static constexpr bool INTEGER = false, SCALED = true;
    static constexpr int UNIT = 256, PRODUCT = 16, INPUT_BYTES = 2, PIECES = 32;
    DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        mma_bf16(d, a, b);
    }
    DEVICE uint32_t pack(float low, float high) {
        return bf16x2(low, high);
    }
};

// A packed field becomes a bf16 by standing in the mantissa of 128: 128 + v * 2^p, where p is its lowest bit there; a fused multiply-add
// with 2^-p takes that and the field's offset off again, all of it exact. Fields of two and three bits have room at p = 0, 2 and 4, so that
// one shift serves three of them.

// Two bits, -2 to 1. A word has the products 2 j and 2 j + 1; register i of product j % 2 has its field at bit 2 (4 (j % 2) + i) of
// either half.
struct Int2 : Float {
    static constexpr int TILE = 4096, WORDS = 4;
    DEVICE void load(const unsigned char* tile, int part, int lane, uint32_t (&q)[WORDS]) {
        load_chunks<1>(tile, part, lane, q);
    }
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int field = product % 2 * 4 + i, p = field % 3 * 2;
            const uint32_t biased = and_or(q[product / 2] >> (field / 3 * 6), 0x00030003u << p, 0x43004300u);
            a[i] = bf16x2_fma(biased, 0x3f803f80u - uint32_t(p) * 0x00800080u, p == 0 ? 0xc302c302u : p == 2 ? 0xc208c208u : 0xc120c120u);
        }
    }
};

// Three bits, -4 to 3: a plane with the lower two, laid out as int2, and one with the third. A word of that one serves two words of the
// other: the fields of the first have its even bits, those of the second the odd ones.
struct Int3 : Float {
    static constexpr int TILE = 6144, WORDS = 6;
    DEVICE void load(const unsigned char* tile, int part, int lane, uint32_t (&q)[WORDS]) {
        load_chunks<1>(tile, part, lane, q);
        const uint2 v = reinterpret_cast<const uint2*>(tile + 4096)[part * 32 + lane];
        q[4] = v.x;
        q[5] = v.y;
    }
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int word = product / 2, field = product % 2 * 4 + i, p = field % 3 * 2, shift = field / 3 * 6 + word % 2 - 2;
            const uint32_t third = shift < 0 ? q[4 + word / 2] << -shift : q[4 + word / 2] >> shift;
            const uint32_t low = and_or(q[word] >> (field / 3 * 6), 0x00030003u << p, 0x43004300u);
            const uint32_t biased = and_or(third, 0x00040004u << p, low);
            a[i] = bf16x2_fma(biased, 0x3f803f80u - uint32_t(p) * 0x00800080u, p == 0 ? 0xc304c304u : p == 2 ? 0xc210c210u : 0xc140c140u);
        }
    }
};

// Four bits, -8 to 7. A word is one product; register i has its fields at bit 4 i of either half.
struct Int4 : Float {
    static constexpr int TILE = 8192, WORDS = 8;
    DEVICE void load(const unsigned char* tile, int part, int lane, uint32_t (&q)[WORDS]) {
        load_chunks<2>(tile, part, lane, q);
    }
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = bf16x2_fma(and_or(q[product] >> (4 * i), 0x000f000fu, 0x43004300u), 0x3f803f80u, 0xc308c308u);
    }
};

// The same weights with f16 operands, for inputs whose range is known to fit: eight times finer, and fewer instructions. A mantissa of ten
// bits has room for a field at any even p below 9, so that one shift serves up to five of them: 1024 + v * 2^p, of which the fused
// multiply-add makes v less its offset.
template <int OFFSET>
DEVICE uint32_t f16_field(uint32_t biased, int p) {
    const uint32_t scale = 0x3c00u - (uint32_t(p) << 10), taken = 0x8000u | (25u - uint32_t(p)) << 10 | uint32_t(OFFSET) << p;
    return f16x2_fma(biased, scale * 0x00010001u, taken * 0x00010001u);
}
template <class F>
struct Half : F {
    DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        mma_f16(d, a, b);
    }
    DEVICE uint32_t pack(float low, float high) {
        return f16x2(low, high);
    }
};
struct Int2Half : Half<Int2> {
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int field = product % 2 * 4 + i, p = field % 5 * 2;
            a[i] = f16_field<2>(and_or(q[product / 2] >> (field / 5 * 10), 0x00030003u << p, 0x64006400u), p);
        }
    }
};
struct Int3Half : Half<Int3> {
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int word = product / 2, half = product % 2, p = i * 2, shift = half * 8 + word % 2 - 2;
            const uint32_t plane = shift < 0 ? q[4 + word / 2] << -shift : q[4 + word / 2] >> shift;
            const uint32_t low = and_or(q[word] >> (half * 8), 0x00030003u << p, 0x64006400u);
            a[i] = f16_field<4>(and_or(plane, 0x00040004u << p, low), p);
        }
    }
};
struct Int4Half : Half<Int4> {
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int p = i % 2 * 4;
            a[i] = f16_field<8>(and_or(q[product] >> (i / 2 * 8), 0x000f000fu << p, 0x64006400u), p);
        }
    }
};

// Eight bits, -128 to 127. A word has two registers, bytes 0 and 2 the first. Seven bits stand in the mantissa of 128; the eighth chooses
// what is taken off, -128 or -256, which differ in one bit of their exponents.
struct Int8 : Float {
    static constexpr int TILE = 16384, WORDS = 16;
    DEVICE void load(const unsigned char* tile, int part, int lane, uint32_t (&q)[WORDS]) {
        load_chunks<4>(tile, part, lane, q);
    }
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t v = q[product * 2 + i / 2] >> (8 * (i % 2));
            const uint32_t offset = lop3<(0xf0 & 0xcc) ^ 0xaa>(v, 0x00800080u, 0xc380c380u);
            a[i] = bf16x2_fma(and_or(v, 0x007f007fu, 0x43004300u), 0x3f803f80u, offset);
        }
    }
};

// bf16 as it is. Units are shorter, so that a ring has enough of them.
struct Bf16 : Float {
    static constexpr bool SCALED = false;
    static constexpr int UNIT = 128, PIECES = 16, TILE = 16384, WORDS = 16;
    DEVICE void load(const unsigned char* tile, int part, int lane, uint32_t (&q)[WORDS]) {
        load_chunks<4>(tile, part, lane, q);
    }
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = q[product * 4 + i];
    }
};

// Eight bits times eight bits, summed in 32: a product takes 32 inputs, and a lane's 16 bytes are its operand.
struct Int8Dot {
    typedef int32_t Sum;
    static constexpr bool INTEGER = true, SCALED = true;
    static constexpr int UNIT = 256, PRODUCT = 32, INPUT_BYTES = 1, PIECES = 16, TILE = 16384, WORDS = 16;
    DEVICE void load(const unsigned char* tile, int part, int lane, uint32_t (&q)[WORDS]) {
        load_chunks<4>(tile, part, lane, q);
    }
    DEVICE void expand(const uint32_t (&q)[WORDS], int product, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = q[product * 4 + i];
    }
    DEVICE void multiply(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        mma_s8(d, a, b);
    }
};

}  // namespace
