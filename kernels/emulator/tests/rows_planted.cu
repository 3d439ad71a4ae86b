// Norms with one mistake each, which the tests of rows have to find.
#include "../../rows.cuh"

NORM(norm_lanes_by_rows, rows::LANES_BY_ROWS)
NORM(norm_no_barrier, rows::NO_BARRIER)

KERNELS(EXPORT(norm_lanes_by_rows), EXPORT(norm_no_barrier))
