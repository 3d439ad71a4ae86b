// Attention over cached keys and values; see attention.cuh.
#include "attention.cuh"

ATTENTION(attention_256, 256, true, false, attention::NONE)
ATTENTION(attention_512, 512, true, false, attention::NONE)
ATTENTION(attention_any, 512, false, false, attention::NONE)
COMBINE(attention_combine, false, attention::NONE)

// Over a cache of int8.
ATTENTION(attention_256_int8, 256, true, true, attention::NONE)
ATTENTION(attention_512_int8, 512, true, true, attention::NONE)
ATTENTION(attention_any_int8, 512, false, true, attention::NONE)
COMBINE(attention_combine_int8, true, attention::NONE)

KERNELS(EXPORT(attention_256), EXPORT(attention_512), EXPORT(attention_any), EXPORT(attention_combine), EXPORT(attention_256_int8),
        EXPORT(attention_512_int8), EXPORT(attention_any_int8), EXPORT(attention_combine_int8))
