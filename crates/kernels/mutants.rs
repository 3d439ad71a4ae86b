// Mistakes to plant into kernels/gemm.cuh and kernels/formats.cuh, and the kernel that has each: read by build.rs, which compiles them, and
// by tests/gemm/mutants.rs, which must find every one. The text in the middle stands in the sources exactly once.

pub const MUTANTS: [(&str, &str, &str); 16] = [
    // The right sources, as a control.
    ("gemm_mutant_none", "", ""),
    // Channels 8 to 15 take the scales of 0 to 7.
    ("gemm_mutant_scale", "lower = bf16_to_f32(scale[group * CHANNELS + 8]);", "lower = upper;"),
    // The third bit of the upper weight of a pair is lost.
    ("gemm_mutant_plane", "and_or(third, 0x00040004u << p, low)", "and_or(third, 0x00000004u << p, low)"),
    // Even and odd words change places in the plane of third bits.
    ("gemm_mutant_plane_word", "field / 3 * 6 + word % 2 - 2", "field / 3 * 6 + (word + 1) % 2 - 2"),
    // A stage is read and refilled without a barrier in between.
    (
        "gemm_mutant_ring_barrier",
        "        cp_async_wait<S::COUNT - 2>();\n        sync_threads();\n",
        "        cp_async_wait<S::COUNT - 2>();\n",
    ),
    // The halves meet without one.
    (
        "gemm_mutant_halves_barrier",
        "        sync_threads();\n        float* const partial_squares",
        "        float* const partial_squares",
    ),
    // One stage too early.
    ("gemm_mutant_wait", "cp_async_wait<S::COUNT - 2>();", "cp_async_wait<S::COUNT - 1>();"),
    // Sums of segments are not published before they are counted.
    ("gemm_mutant_fence", "                fence_gpu();\n                *last", "                *last"),
    // Two segments change places.
    (
        "gemm_mutant_segments",
        "sum += ld_cg(p + size_t(s) * ROWS * size_t(n));",
        "sum += ld_cg(p + size_t(s == 1 ? 2 : s == 2 ? 1 : s) * ROWS * size_t(n));",
    ),
    // Segments are added in pairs where there are more than eight rows: k is cut differently.
    (
        "gemm_mutant_split",
        "for (int s = 1; s < segments; s++) sum += ld_cg(p + size_t(s) * ROWS * size_t(n));",
        "Sum odd = 0; for (int s = 1; s < segments; s++) (s % 2 && ROWS > 8 ? odd : sum) += ld_cg(p + size_t(s) * ROWS * size_t(n)); sum += odd;",
    ),
    // The last unit's inputs are read beyond the row.
    ("gemm_mutant_row_bound", "const bool valid = row < rows && input < k;", "const bool valid = row < rows;"),
    // Lanes of a norm meet in another order where there are more than eight rows.
    (
        "gemm_mutant_norm_lanes",
        "for (int lanes = PIECES / 2; lanes; lanes /= 2) sum += shuffle_xor(sum, lanes);",
        "for (int lanes = ROWS > 8 ? 1 : PIECES / 2; lanes && lanes < PIECES; lanes = ROWS > 8 ? lanes * 2 : lanes / 2) sum += shuffle_xor(sum, lanes);",
    ),
    // A head is finished before what its last column holds is published.
    (
        "gemm_mutant_head_fence",
        "                fence_gpu();\n                uint32_t complete = 0;",
        "                uint32_t complete = 0;",
    ),
    // A head is finished one column too early.
    (
        "gemm_mutant_head_early",
        "== uint32_t(high - low)) complete |= 1u << i;",
        "== uint32_t(high > low ? high - low - 1 : 0)) complete |= 1u << i;",
    ),
    // Among equal logits the first row of the head wins, not the lowest token.
    ("gemm_mutant_best_row", "decide::rank(logit, token)", "decide::rank(logit, token * 0u + uint32_t(channel[i]))"),
    // A norm's sum is not counted for the last unit of a segment.
    ("gemm_mutant_norm_unit", "float sum = squares[pass];", "float sum = 0.0f;"),
];
