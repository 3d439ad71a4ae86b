// Decisions with one mistake each, which the tests of decisions have to find.
#include "../../decide.cuh"

BEST_TOKEN(best_token_highest_tie, decide::HIGHEST_TIE)
ACCEPT(accept_any_branch, decide::ANY_BRANCH)

KERNELS(EXPORT(best_token_highest_tie), EXPORT(accept_any_branch))
