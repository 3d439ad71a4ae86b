// The persistent drafter without one of its barriers, which its tests have to find.
#include "../../draft.cuh"

DRAFT_ALL(draft_all_dropped_barrier, false, false, draft::DROPPED_BARRIER)

KERNELS(EXPORT(draft_all_dropped_barrier))
