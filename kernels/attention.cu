// Attention over cached keys and values; see attention.cuh.
#include "attention.cuh"

ATTENTION(attention_256, 256, true, attention::NONE)
ATTENTION(attention_512, 512, true, attention::NONE)
ATTENTION(attention_any, 512, false, attention::NONE)
COMBINE(attention_combine, attention::NONE)

KERNELS(EXPORT(attention_256), EXPORT(attention_512), EXPORT(attention_any), EXPORT(attention_combine))
