// Small kernels for the emulator's own tests. Each is correct with `bug` = 0; any other value plants one mistake, which
// the emulator has to find. The numbers are those of crates/kernels/tests/emulator.rs.
#include "../../ptx.cuh"

namespace {

constexpr int STAGES = 3, TILE = 512;  // floats

// y[block] = sum of x[block, tiles, TILE], through a ring of asynchronous copies.
KERNEL(ring_sum, 128)(const float* x, float* y, int tiles, int bug) {
    DYN_SMEM(float, ring);
    const int thread = int(threadIdx.x);
    const float* mine = x + size_t(blockIdx.x) * size_t(tiles) * TILE;
    const auto fetch = [&](int tile) {
        const int at = tile % STAGES * TILE + thread * 4;
        // 3: a tile's offset that is one warp too far.
        if (tile < tiles) cp_async16(ring + at, mine + size_t(tile) * TILE + size_t(thread + (bug == 3 ? 32 : 0)) * 4);
        cp_async_commit();
    };
    for (int tile = 0; tile < STAGES - 1; tile++) fetch(tile);
    float sum = 0.0f;
    for (int tile = 0; tile < tiles; tile++) {
        // 2: one group too many is left on its way.
        if (bug == 2)
            cp_async_wait<STAGES - 1>();
        else
            cp_async_wait<STAGES - 2>();
        // 1: no barrier between copies and their readers.
        if (bug != 1) sync_threads();
        fetch(tile + STAGES - 1);
        // Another thread's quarter, so that the barrier matters.
        const int other = (thread + 37) % 128;
        for (int i = 0; i < 4; i++) sum += ring[tile % STAGES * TILE + other * 4 + i];
    }
    // 4: copies that nobody waits for.
    if (bug == 4) {
        sync_threads();
        cp_async16(ring + thread * 4, mine);
        cp_async_commit();
    }
    cp_async_wait<0>();
    if (bug == 4) cp_async16(ring + thread * 4, mine);
    sync_threads();
    ring[thread] = sum;
    sync_threads();
    if (thread == 0) {
        float all = 0.0f;
        for (int i = 0; i < 128; i++) all += ring[i];
        y[blockIdx.x] = all;
    }
}

// y[0] = sum of the blocks' parts, added by the last block that is done, in block order.
KERNEL(last_block_sum, 64)(const float* x, float* part, uint32_t* counter, float* y, int bug) {
    DYN_SMEM(uint32_t, last);
    const unsigned thread = threadIdx.x, block = blockIdx.x;
    part[block * 64 + thread] = x[block * 64 + thread];
    // 6: the fence stands before the barrier, in threads that do not publish.
    if (bug == 6 && thread != 0) fence_gpu();
    sync_threads();
    if (thread == 0) {
        // 5: no fence before the counter.
        if (bug != 5 && bug != 6) fence_gpu();
        last[0] = atomic_add(counter, 1u) == gridDim.x - 1;
        fence_gpu();
    }
    // 7: no barrier before the flag is read.
    if (bug != 7) sync_threads();
    if (!last[0]) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) {
        // 8: a plain load, which another block's write may not reach; 9: the read-only path.
        const float* from = part + b * 64 + thread;
        sum += bug == 8 ? *from : bug == 9 ? ld_nc(from) : ld_cg(from);
    }
    y[thread] = sum;
    if (thread == 0) *counter = 0;
}

// y = sum of x, then sum of squares, with one scratch row for both.
KERNEL(two_sums, 128)(const float* x, float* y, int bug) {
    DYN_SMEM(float, scratch);
    const unsigned thread = threadIdx.x;
    const auto block_sum = [&](float v) {
        for (int lanes = 16; lanes; lanes /= 2) v += shuffle_xor(v, lanes);
        if (thread % 32 == 0) scratch[thread / 32] = v;
        sync_threads();
        const float sum = scratch[0] + scratch[1] + scratch[2] + scratch[3];
        // 10: no barrier before the scratch row is used again.
        if (bug != 10) sync_threads();
        return sum;
    };
    const float v = x[thread], sum = block_sum(v), squares = block_sum(v * v);
    if (thread == 0) {
        y[0] = sum;
        y[1] = squares;
    }
}

// Each warp reverses its 32 values through shared memory.
KERNEL(warp_reverse, 64)(const float* x, float* y, int bug) {
    DYN_SMEM(float, row);
    const unsigned thread = threadIdx.x, lane = thread % 32;
    row[thread] = x[thread];
    // 11: no warp barrier. 12: one of half of the warp each, although the halves read each other's.
    if (bug == 12)
        sync_warp(lane < 16 ? 0x0000ffffu : 0xffff0000u);
    else if (bug != 11)
        sync_warp();
    y[thread] = row[thread - lane + 31 - lane];
    // Within the halves, half a warp is enough.
    sync_warp();
    row[thread] = y[thread];
    sync_warp(lane < 16 ? 0x0000ffffu : 0xffff0000u);
    y[thread] = row[thread ^ 15];
}

// One warp writes what the other reads, by a named barrier that the writer only arrives at.
KERNEL(hand_over, 64)(const float* x, float* y, int bug) {
    DYN_SMEM(float, row);
    const unsigned thread = threadIdx.x, lane = thread % 32;
    if (thread < 32) {
        row[lane] = x[lane];
        barrier_arrive(1, 64);
        // 13: a write after the hand-over.
        if (bug == 13) row[lane] = 0.0f;
    } else {
        barrier_sync(1, 64);
        y[lane] = row[31 - lane];
    }
    // 14: a named barrier that too few reach.
    if (bug == 14 && thread < 32) barrier_sync(2, 64);
}

// d[16, 8] = a[16, 16] b[8, 16], row-major, 16-bit: ldmatrix, mma. A block is one warp.
KERNEL(one_product, 32)(const uint32_t* a, const uint32_t* b, float* d, int is_bf16) {
    DYN_SMEM(uint32_t, shared);  // a: 16 rows of 8 words, then b: 8 rows
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 128; i += 32) shared[i] = a[i];
    for (unsigned i = lane; i < 64; i += 32) shared[128 + i] = b[i];
    sync_threads();
    uint32_t left[4], right[2];
    ldmatrix_x4(left, shared + lane % 16 * 8 + lane / 16 * 4);
    ldmatrix_x2(right, shared + 128 + lane % 8 * 8 + lane / 8 % 2 * 4);
    float sums[4] = {};
    if (is_bf16)
        mma_bf16(sums, left, right);
    else
        mma_f16(sums, left, right);
    const unsigned g = lane / 4, t = lane % 4 * 2;
    d[g * 8 + t] = sums[0];
    d[g * 8 + t + 1] = sums[1];
    d[(g + 8) * 8 + t] = sums[2];
    d[(g + 8) * 8 + t + 1] = sums[3];
}

// The transposed load: word i of y[lane] holds column pairs of the four 8 x 8 matrices of x[32 rows of 8].
KERNEL(transpose_load, 32)(const uint32_t* x, uint32_t* y) {
    DYN_SMEM(uint32_t, shared);
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 128; i += 32) shared[i] = x[i];
    sync_threads();
    uint32_t r[4];
    ldmatrix_x4_trans(r, shared + lane * 4);
    for (int i = 0; i < 4; i++) y[lane * 4 + unsigned(i)] = r[i];
}

// d[16, 8] += a[16, 32] b[8, 32] in int8, fragments straight from row-major words.
KERNEL(one_product_s8, 32)(const uint32_t* a, const uint32_t* b, int32_t* d) {
    const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const uint32_t left[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    const uint32_t right[2] = {b[g * 8 + t], b[g * 8 + t + 4]};
    int32_t sums[4];
    for (unsigned i = 0; i < 4; i++) sums[i] = d[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
    mma_s8(sums, left, right);
    for (unsigned i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = sums[i];
}

// Rounds of a persistent kernel: in each, a block adds what its neighbour wrote in the round before. state[2][blocks],
// barrier[2].
KERNEL(rounds, 64)(uint32_t* state, uint32_t* barrier, int count, int bug) {
    const unsigned thread = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
    for (int round = 0; round < count; round++) {
        if (thread == 0) {
            const uint32_t* from = state + size_t(round % 2) * blocks + (block + 1) % blocks;
            // 16: a plain load of what another block wrote.
            const uint32_t neighbour = bug == 16 && round ? *from : ld_cg(from);
            state[size_t((round + 1) % 2) * blocks + block] = neighbour + 1;
        }
        // All blocks meet: the last to arrive opens the next round.
        sync_threads();
        if (thread == 0) {
            const uint32_t target = uint32_t(round) + 1;
            // 15: the counter is raised without release.
            const uint32_t arrived = bug == 15 ? atomic_add(barrier, 1u) : atomic_add_acq_rel(barrier, 1u);
            if (arrived == blocks * target - 1) st_release(barrier + 1, target);
            // 17: the last round's word is never set.
            while (ld_acquire(barrier + 1) < target + uint32_t(bug == 17)) pause(20);
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

// Mistakes of one line each, in a kernel that is otherwise y[block, thread] = x[thread].
KERNEL(slips, 64)(const float* x, float* y, float* scratch, int bug) {
    DYN_SMEM(float, shared);
    const unsigned thread = threadIdx.x, lane = thread % 32;
    float v = x[thread];
    switch (bug) {
        case 20:  // a barrier after some threads ended
            if (thread >= 32) return;
            sync_threads();
            break;
        case 21:  // two barriers for one meeting
            if (thread % 2)
                sync_threads();
            else
                sync_threads();
            break;
        case 22:  // half of the mask never comes
            if (lane < 16) v = shuffle_xor(v, 1);
            break;
        case 23:  // a lane outside of the mask
            if (lane < 16) v = shuffle(v, 20, 0x0000ffffu);
            break;
        case 24:  // one past the end of shared memory
            shared[thread] = v;
            sync_threads();
            v = shared[thread + 1];
            break;
        case 25:  // never written shared memory
            v = shared[thread];
            break;
        case 26:  // every thread writes one word
            scratch[0] = v;
            break;
        case 27:  // 16 bytes from any address
            v = reinterpret_cast<const float4*>(x + thread % 32)->x;
            break;
        case 28: {  // past the end of a local array
            float local[4] = {v, v, v, v};
            for (int i = 0; i < 4 + int(v < 1e30f); i++) local[i] += 1.0f;
            v = local[lane % 4];
            break;
        }
        case 29:  // never written global memory
            v = scratch[thread];
            break;
        case 30:  // a pointer from nowhere
            v = *reinterpret_cast<const float*>(uintptr_t(0x12340 + thread * 4));
            break;
        case 31:
            if (thread == 5) trap();
            break;
        case 32:  // lanes of one mask at different operations
            if (lane < 16)
                v += float(any(v > 0.0f));
            else
                v = shuffle_xor(v, 1);
            break;
        case 33:  // a shift by the width
            v = from_bits(bits(v) << (bug - 1));
            break;
        case 34:  // waits for a word in a launch whose other blocks cannot run
            while (ld_acquire(reinterpret_cast<const uint32_t*>(x)) == bits(v)) pause(20);
            break;
        case 35:  // a write to what the launch declares constant
            const_cast<float*>(x)[thread] = v + 1.0f;
            break;
        case 36:  // a word of which only half was written
            reinterpret_cast<uint16_t*>(scratch)[thread * 2] = 0;
            v = scratch[thread];
            break;
        default:
            break;
    }
    y[blockIdx.x * 64 + thread] = v;
}

}  // namespace

KERNELS(EXPORT(ring_sum), EXPORT(last_block_sum), EXPORT(two_sums), EXPORT(warp_reverse), EXPORT(hand_over),
        EXPORT(one_product), EXPORT(transpose_load), EXPORT(one_product_s8), EXPORT(rounds), EXPORT(slips))
