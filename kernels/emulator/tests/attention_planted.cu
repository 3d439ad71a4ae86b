// Attention with one mistake each, which the tests of attention have to find.
#include "../../attention.cuh"

using namespace attention;

ATTENTION(attention_border_at_base, 512, false, false, BORDER_AT_BASE)
ATTENTION(attention_bound_too_far, 512, false, false, BOUND_TOO_FAR)
ATTENTION(attention_no_barrier, 512, false, false, NO_BARRIER)
COMBINE(combine_border_at_base, false, BORDER_AT_BASE)
COMBINE(combine_self_unrounded, false, SELF_UNROUNDED)
COMBINE(combine_swapped_chunks, false, SWAPPED_CHUNKS)

KERNELS(EXPORT(attention_border_at_base), EXPORT(attention_bound_too_far), EXPORT(attention_no_barrier),
        EXPORT(combine_border_at_base), EXPORT(combine_self_unrounded), EXPORT(combine_swapped_chunks))
