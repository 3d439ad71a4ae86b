// A pair of products without the barrier in between, which its tests have to find.
#include "../../pair.cuh"

PAIR(pair_no_barrier, Int4, 8, 128, NO_GRID_BARRIER)

KERNELS(EXPORT(pair_no_barrier))
