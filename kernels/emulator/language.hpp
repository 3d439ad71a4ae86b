// What a kernel source sees when it is compiled for the CPU: the CUDA words that it may use, mapped to the emulator.
// Force-included before every .cu. Everything else that a kernel needs comes from ptx.cuh, which has one set of names
// and two implementations: PTX for the GPU, wrappers.hpp for the emulator.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define EMULATED 1
#define __device__
#define __forceinline__ inline __attribute__((always_inline, unused))

// CUDA's vector types, with CUDA's alignment.
#define EMULATOR_VECTOR(T, NAME)                        \
    struct alignas(2 * sizeof(T)) NAME##2 {             \
        T x, y;                                         \
    };                                                  \
    struct alignas(4 * sizeof(T)) NAME##4 {             \
        T x, y, z, w;                                   \
    };                                                  \
    inline NAME##2 make_##NAME##2(T x, T y) {           \
        return {x, y};                                  \
    }                                                   \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { \
        return {x, y, z, w};                            \
    }
EMULATOR_VECTOR(int, int)
EMULATOR_VECTOR(unsigned, uint)
EMULATOR_VECTOR(float, float)
#undef EMULATOR_VECTOR

template <class T>
__forceinline__ T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
__forceinline__ T max(T a, T b) {
    return a < b ? b : a;
}

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// The part of a thread's state that kernel code reads.
struct Thread {
    Index thread, block, block_size, grid;
    char* shared;
};

// The thread that runs now on this OS thread. Kernels run as fibers of the OS thread that launched them.
extern thread_local Thread* current;

// One kernel of a family, as the launch code calls it.
struct Kernel {
    const char* name;
    void (*call)(void* const* arguments);
    const uint32_t* argument_bytes;
    uint32_t arguments;
    uint32_t threads;  // launch bound
};

// All kernels of one .cu, compiled in one mode.
struct Family {
    const Kernel* kernels;
    uint32_t count;
};

template <auto F, class... P, size_t... I>
inline void call_with(void* const* arguments, void (*)(P...), std::index_sequence<I...>) {
    F(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
}

// Sizes of a kernel's arguments; one element more, since an array of none is not C++.
template <class... P>
struct Sizes {
    static constexpr uint32_t bytes[] = {uint32_t(sizeof(P))..., 0};
};

template <auto F, class... P>
constexpr Kernel describe(const char* name, unsigned threads, void (*)(P...)) {
    return {name, [](void* const* arguments) { call_with<F>(arguments, F, std::index_sequence_for<P...>()); },
            Sizes<P...>::bytes, uint32_t(sizeof...(P)), threads};
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define blockDim (emulator::current->block_size)
#define gridDim (emulator::current->grid)

// A kernel and the most threads that a block of it has.
#define KERNEL(name, threads)                                    \
    static constexpr unsigned emulator_threads_##name = threads; \
    static void name
#define KERNEL_ALONE(name, threads) KERNEL(name, threads)
// The block's dynamic shared memory, the only shared memory there is, as T*.
#define DYN_SMEM(T, name) T* name = reinterpret_cast<T*>(emulator::current->shared)
// The list at the end of a .cu: KERNELS(EXPORT(a), EXPORT(b)). EMULATOR_FAMILY is the name of this list, given by the
// build.
#define EXPORT(name) emulator::describe<&name>(#name, emulator_threads_##name, &name)
#define KERNELS(...)                                                                         \
    static const emulator::Kernel emulator_list[] = {__VA_ARGS__};                           \
    extern "C" __attribute__((visibility("hidden"))) const emulator::Family EMULATOR_FAMILY; \
    extern "C" const emulator::Family EMULATOR_FAMILY = {emulator_list, sizeof emulator_list / sizeof *emulator_list};
