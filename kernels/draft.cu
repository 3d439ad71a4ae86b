// The drafter's passes; see draft.cuh.
#include "draft.cuh"

KERNEL(draft_begin, 32)(DRAFT_PARAMETERS) {
    const draft::Draft d = DRAFT_ARGUMENTS;
    draft::begin(d);
}
KERNEL(draft_phase_bf16, draft::THREADS)(DRAFT_PARAMETERS, int depth, int index) {
    const draft::Draft d = DRAFT_ARGUMENTS;
    draft::phase<false>(d, depth, index);
}
KERNEL(draft_phase_int8, draft::THREADS)(DRAFT_PARAMETERS, int depth, int index) {
    const draft::Draft d = DRAFT_ARGUMENTS;
    draft::phase<true>(d, depth, index);
}
DRAFT_ALL(draft_all_bf16, false, draft::NONE)
DRAFT_ALL(draft_all_int8, true, draft::NONE)

KERNELS(EXPORT(draft_begin), EXPORT(draft_phase_bf16), EXPORT(draft_phase_int8), EXPORT(draft_all_bf16), EXPORT(draft_all_int8))
