// The names of ptx.cuh, emulated. Calls that meet other threads carry the line of the kernel source that they stand on,
// so that two barriers on different lines stay different whatever the optimiser merges.
#pragma once

#include <immintrin.h>

#include "language.hpp"

namespace emulator {

struct Place {
    const char* file;
    int line;
};

// How a load of global memory is cached: what decides whether it may see what another block wrote in the same launch.
enum class Cache : int {
    Plain,     // L1: may be stale
    Constant,  // .nc: the buffer must not be written in this launch at all
    L2,        // .cg and cp.async.cg: coherent
};

enum class Combine : int { Add, Max, Min, Exchange, Or, And, Swap };

void barrier(int id, int count, bool wait, Place place);
void warp_barrier(uint32_t mask, Place place);
void fence();
void yield();
[[noreturn]] void trap(const char* why, Place place);
void load(void* to, const void* from, unsigned bytes, Cache cache);
uint32_t load_acquire(const uint32_t* from);
void store_release(uint32_t* to, uint32_t value);
uint64_t combine(void* at, unsigned bytes, Combine how, uint64_t value, uint64_t expected, bool acquire_release,
                 bool is_signed);
void copy(void* shared, const void* global, unsigned bytes, unsigned valid);
void copy_commit();
void copy_wait(unsigned pending);
void exchange(uint32_t mask, uint32_t* value, int from, Place place);
uint32_t vote(uint32_t mask, bool predicate, Place place);
void matrix_load(uint32_t* registers, const void* row, int count, bool transposed, Place place);
enum class Operand : int { F16, Bf16 };
void multiply(float* d, const uint32_t* a, const uint32_t* b, Operand operand, Place place);
void multiply_s8(int32_t* d, const uint32_t* a, const uint32_t* b, Place place);

inline unsigned lane() {
    const Thread& t = *current;
    return (t.thread.x + t.block_size.x * (t.thread.y + t.block_size.y * t.thread.z)) & 31;
}

// The nearest f32 of a double, with the last bit set if inexact: rounding that to 16 bits then rounds once.
__forceinline__ float to_odd(double d) {
    float f = static_cast<float>(d);
    if (static_cast<double>(f) == d || f != f) return f;
    uint32_t u;
    memcpy(&u, &f, 4);
    if (std::fabs(static_cast<double>(f)) > std::fabs(d)) u--;
    u |= 1;
    memcpy(&f, &u, 4);
    return f;
}
__forceinline__ float from_half(uint16_t h) {
    return _cvtsh_ss(h);
}
__forceinline__ uint16_t to_half(float f) {
    return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
}
__forceinline__ float from_bf16(uint16_t b) {
    const uint32_t u = uint32_t(b) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
__forceinline__ uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;  // the canonical NaN of cvt.rn.bf16
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
template <float (*From)(uint16_t), uint16_t (*To)(float)>
__forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [](uint32_t a, uint32_t b, uint32_t c) {
        return To(to_odd(double(From(uint16_t(a))) * double(From(uint16_t(b))) + double(From(uint16_t(c)))));
    };
    return one(a, b, c) | uint32_t(one(a >> 16, b >> 16, c >> 16)) << 16;
}

}  // namespace emulator

#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define DEVICE static __forceinline__

// Barriers.
DEVICE void sync_threads(EMULATOR_PLACE) {
    emulator::barrier(0, 0, true, {file, line});
}
DEVICE void barrier_sync(int id, int threads, EMULATOR_PLACE) {
    emulator::barrier(id, threads, true, {file, line});
}
DEVICE void barrier_arrive(int id, int threads, EMULATOR_PLACE) {
    emulator::barrier(id, threads, false, {file, line});
}
DEVICE void sync_warp(uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    emulator::warp_barrier(mask, {file, line});
}

// Order between blocks.
DEVICE void fence_gpu() {
    emulator::fence();
}
DEVICE void fence_system() {
    emulator::fence();
}
DEVICE uint32_t ld_acquire(const uint32_t* p) {
    return emulator::load_acquire(p);
}
DEVICE void st_release(uint32_t* p, uint32_t v) {
    emulator::store_release(p, v);
}
#define EMULATOR_ATOMIC(NAME, HOW, ORDERED)                                                                         \
    template <class T>                                                                                              \
    DEVICE T NAME(T* p, T v) {                                                                                      \
        static_assert(std::is_integral_v<T>, "float atomics add in an order that nobody chose");                    \
        return T(                                                                                                   \
            emulator::combine(p, sizeof(T), emulator::Combine::HOW, uint64_t(v), 0, ORDERED, std::is_signed_v<T>)); \
    }
EMULATOR_ATOMIC(atomic_add, Add, false)
EMULATOR_ATOMIC(atomic_max, Max, false)
EMULATOR_ATOMIC(atomic_min, Min, false)
EMULATOR_ATOMIC(atomic_or, Or, false)
EMULATOR_ATOMIC(atomic_exchange, Exchange, false)
EMULATOR_ATOMIC(atomic_add_acq_rel, Add, true)
#undef EMULATOR_ATOMIC
DEVICE uint32_t atomic_cas(uint32_t* p, uint32_t expected, uint32_t v) {
    return uint32_t(emulator::combine(p, 4, emulator::Combine::Swap, v, expected, false, false));
}
DEVICE void pause(unsigned) {
    emulator::yield();
}
DEVICE void trap(EMULATOR_PLACE) {
    emulator::trap("trap()", {file, line});
}

// Between the lanes of a warp.
template <class T>
DEVICE T emulator_exchange(T v, int from, uint32_t mask, emulator::Place place) {
    static_assert(sizeof(T) == 4, "shuffles move 32 bits");
    uint32_t word;
    memcpy(&word, &v, 4);
    emulator::exchange(mask, &word, from, place);
    memcpy(&v, &word, 4);
    return v;
}
template <class T>
DEVICE T shuffle(T v, int from, uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    return emulator_exchange(v, from & 31, mask, {file, line});
}
template <class T>
DEVICE T shuffle_xor(T v, int lanes, uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    return emulator_exchange(v, int(emulator::lane() ^ unsigned(lanes)), mask, {file, line});
}
template <class T>
DEVICE T shuffle_down(T v, unsigned lanes, uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    const unsigned from = emulator::lane() + lanes;
    return emulator_exchange(v, int(from > 31 ? emulator::lane() : from), mask, {file, line});
}
DEVICE uint32_t ballot(bool p, uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    return emulator::vote(mask, p, {file, line});
}
DEVICE bool any(bool p, uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    return emulator::vote(mask, p, {file, line}) != 0;
}
DEVICE bool all(bool p, uint32_t mask = 0xffffffffu, EMULATOR_PLACE) {
    return emulator::vote(mask, p, {file, line}) == mask;
}

// Loads and stores of global memory.
template <class T>
DEVICE T emulator_load(const T* p, emulator::Cache cache) {
#ifdef EMULATOR_CHECKED
    T v;
    emulator::load(&v, p, sizeof(T), cache);
    return v;
#else
    (void)cache;
    return *p;
#endif
}
template <class T>
DEVICE T ld_nc(const T* p) {
    return emulator_load(p, emulator::Cache::Constant);
}
template <class T>
DEVICE T ld_cg(const T* p) {
    return emulator_load(p, emulator::Cache::L2);
}

// Asynchronous copies to shared memory.
DEVICE void cp_async16(void* shared, const void* global) {
    emulator::copy(shared, global, 16, 16);
}
DEVICE void cp_async16_once(void* shared, const void* global) {
    emulator::copy(shared, global, 16, 16);
}
DEVICE void cp_async16_or_zero(void* shared, const void* global, bool valid) {
    emulator::copy(shared, global, 16, valid ? 16 : 0);
}
DEVICE void cp_async_commit() {
    emulator::copy_commit();
}
template <int PENDING>
DEVICE void cp_async_wait() {
    emulator::copy_wait(PENDING);
}

// Matrices.
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMULATOR_PLACE) {
    emulator::matrix_load(r, row, 4, false, {file, line});
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMULATOR_PLACE) {
    emulator::matrix_load(r, row, 4, true, {file, line});
}
DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row, EMULATOR_PLACE) {
    emulator::matrix_load(r, row, 2, false, {file, line});
}
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_PLACE) {
    emulator::multiply(d, a, b, emulator::Operand::F16, {file, line});
}
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_PLACE) {
    emulator::multiply(d, a, b, emulator::Operand::Bf16, {file, line});
}
DEVICE void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATOR_PLACE) {
    emulator::multiply_s8(d, a, b, {file, line});
}

// Arithmetic on registers.
template <int TABLE>
DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r = 0;
    if (TABLE & 1) r |= ~a & ~b & ~c;
    if (TABLE & 2) r |= ~a & ~b & c;
    if (TABLE & 4) r |= ~a & b & ~c;
    if (TABLE & 8) r |= ~a & b & c;
    if (TABLE & 16) r |= a & ~b & ~c;
    if (TABLE & 32) r |= a & ~b & c;
    if (TABLE & 64) r |= a & b & ~c;
    if (TABLE & 128) r |= a & b & c;
    return r;
}
DEVICE uint32_t f16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
    return emulator::fma_pair<emulator::from_half, emulator::to_half>(a, b, c);
}
DEVICE uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
    return emulator::fma_pair<emulator::from_bf16, emulator::to_bf16>(a, b, c);
}
DEVICE uint32_t f16x2(float low, float high) {
    return emulator::to_half(low) | uint32_t(emulator::to_half(high)) << 16;
}
DEVICE uint32_t bf16x2(float low, float high) {
    return emulator::to_bf16(low) | uint32_t(emulator::to_bf16(high)) << 16;
}
DEVICE float f16_to_f32(uint16_t v) {
    return emulator::from_half(v);
}
DEVICE float ex2(float x) {
    return exp2f(x);
}
DEVICE float max_nan(float a, float b) {
    return a != a || a > b ? a : b;
}
DEVICE float rsqrt(float x) {
    return 1.0f / sqrtf(x);
}
DEVICE uint32_t bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
DEVICE float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
