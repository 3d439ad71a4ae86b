// The drafter's passes; see draft.cuh.
#include "draft.cuh"

KERNEL(draft_begin, 32)(DRAFT_PARAMETERS) {
    const draft::Draft d = DRAFT_ARGUMENTS;
    draft::begin(d);
}
DRAFT_PHASE(draft_phase_bf16, false, false)
DRAFT_PHASE(draft_phase_int8, true, false)
DRAFT_PHASE(draft_phase_bf16_kv8, false, true)
DRAFT_PHASE(draft_phase_int8_kv8, true, true)
DRAFT_ALL(draft_all_bf16, false, false, draft::NONE)
DRAFT_ALL(draft_all_int8, true, false, draft::NONE)
DRAFT_ALL(draft_all_bf16_kv8, false, true, draft::NONE)
DRAFT_ALL(draft_all_int8_kv8, true, true, draft::NONE)

KERNELS(EXPORT(draft_begin), EXPORT(draft_phase_bf16), EXPORT(draft_phase_int8), EXPORT(draft_phase_bf16_kv8),
        EXPORT(draft_phase_int8_kv8), EXPORT(draft_all_bf16), EXPORT(draft_all_int8), EXPORT(draft_all_bf16_kv8),
        EXPORT(draft_all_int8_kv8))
