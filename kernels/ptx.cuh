// Every instruction that CUDA C++ cannot say, under one set of names: the only file with inline PTX. The emulator
// implements the same names in emulator/wrappers.hpp, so that kernels are compiled unchanged for both. Kernels use
// these names and plain C++ only; no CUDA header is included.
//
// 16-bit floats travel as the bits of pairs in uint32_t, the lower half first.
#pragma once

#ifdef EMULATED
#include "emulator/wrappers.hpp"
#else

// NVRTC has no <cstdint>.
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef signed int int32_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)

#define DEVICE static __device__ __forceinline__
// A kernel and the most threads that a block of it has.
#define KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads) name
// The same of a kernel whose shared memory leaves no room for a second block, so that it may have all registers.
#define KERNEL_ALONE(name, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name
// The block's dynamic shared memory, the only shared memory there is, as T*.
#define DYN_SMEM(T, name)                                      \
    extern __shared__ __align__(128) unsigned char dyn_smem[]; \
    T* name = reinterpret_cast<T*>(dyn_smem)
// The list at the end of a .cu is for the emulator.
#define EXPORT(name)
#define KERNELS(...)

DEVICE uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers. `threads` is a multiple of 32; barrier 0 is that of sync_threads.
DEVICE void sync_threads() {
    __syncthreads();
}
DEVICE void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void sync_warp(uint32_t mask = 0xffffffffu) {
    __syncwarp(mask);
}

// Order between blocks. Atomics without an order in their name are relaxed: order comes from fence_gpu() on both sides.
DEVICE void fence_gpu() {
    __threadfence();
}
// The same, seen by the host as well: in front of the word that says that pinned memory is written.
DEVICE void fence_system() {
    __threadfence_system();
}
DEVICE uint32_t ld_acquire(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void st_release(uint32_t* p, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
template <class T>
DEVICE T atomic_add(T* p, T v) {
    return atomicAdd(p, v);
}
template <class T>
DEVICE T atomic_max(T* p, T v) {
    return atomicMax(p, v);
}
template <class T>
DEVICE T atomic_min(T* p, T v) {
    return atomicMin(p, v);
}
template <class T>
DEVICE T atomic_or(T* p, T v) {
    return atomicOr(p, v);
}
template <class T>
DEVICE T atomic_exchange(T* p, T v) {
    return atomicExch(p, v);
}
DEVICE uint32_t atomic_cas(uint32_t* p, uint32_t expected, uint32_t v) {
    return atomicCAS(p, expected, v);
}
DEVICE uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t v) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
    return before;
}
DEVICE void pause(unsigned nanoseconds) {
    __nanosleep(nanoseconds);
}
DEVICE void trap() {
    __trap();
}

// Between the lanes of a warp.
template <class T>
DEVICE T shuffle(T v, int from, uint32_t mask = 0xffffffffu) {
    return __shfl_sync(mask, v, from);
}
template <class T>
DEVICE T shuffle_xor(T v, int lanes, uint32_t mask = 0xffffffffu) {
    return __shfl_xor_sync(mask, v, lanes);
}
template <class T>
DEVICE T shuffle_down(T v, unsigned lanes, uint32_t mask = 0xffffffffu) {
    return __shfl_down_sync(mask, v, lanes);
}
DEVICE uint32_t ballot(bool p, uint32_t mask = 0xffffffffu) {
    return __ballot_sync(mask, p);
}
DEVICE bool any(bool p, uint32_t mask = 0xffffffffu) {
    return __any_sync(mask, p);
}
DEVICE bool all(bool p, uint32_t mask = 0xffffffffu) {
    return __all_sync(mask, p);
}

// Loads of global memory: ld_nc for what no block writes in this launch, ld_cg for what another block may have written.
template <class T>
DEVICE T ld_nc(const T* p) {
    return __ldg(p);
}
template <class T>
DEVICE T ld_cg(const T* p) {
    return __ldcg(p);
}

// Asynchronous copies of 16 bytes to shared memory, around L1.
DEVICE void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// For bytes that are read once: the first to leave L2, so that weights do not push activations and KV out of its 6 MB.
DEVICE void cp_async16_once(void* shared, const void* global) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy; }" ::"r"(shared_address(shared)),
        "l"(global)
        : "memory");
}
// Zeros where not `valid`; the source is not read then.
DEVICE void cp_async16_or_zero(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most PENDING of this thread's groups are on their way.
template <int PENDING>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Matrices of 8 x 8 16-bit values: lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
// d[16, 8] += a[16, 16] b[16, 8]. With g = lane / 4 and t = lane % 4: a holds rows g and g + 8 at columns 2t and 2t +
// 8, b column g at rows 2t and 2t + 8, d rows g and g + 8 at columns 2t.
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d[16, 8] += a[16, 32] b[32, 8] in integers: columns 4t and 4t + 16 of a, rows likewise of b.
DEVICE void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Arithmetic on registers. Bit i of TABLE is the result for a, b, c = the bits 2, 1, 0 of i.
template <int TABLE>
DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return d;
}
DEVICE uint32_t f16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE uint32_t f16x2(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE uint32_t bf16x2(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE float f16_to_f32(uint16_t v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The larger; NaN where either is.
DEVICE float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
DEVICE float rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE uint32_t bits(float f) {
    return __float_as_uint(f);
}
DEVICE float from_bits(uint32_t u) {
    return __uint_as_float(u);
}
#endif

// A bf16 is the upper half of an f32.
DEVICE float bf16_to_f32(uint32_t v) {
    return from_bits(v << 16);
}
