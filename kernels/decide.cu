// What a step decides; see decide.cuh.
#include "decide.cuh"

BEST_TOKEN(best_token, decide::NONE)
KERNEL(score, decide::THREADS)(const float* logits, const int* targets, float* out, uint32_t* state, int count, float cap) {
    decide::score(logits, targets, out, state, count, cap);
}
KERNEL(place_rows, 32)(const uint32_t* state, const uint32_t* drafts, uint32_t* tokens, int2* table, int rows, int main,
                       uint64_t depths) {
    decide::place_rows(state, drafts, tokens, table, rows, main, depths);
}
ACCEPT(accept, decide::NONE)
KERNEL(settle, decide::THREADS)(const uint32_t* state, uint4* kv, const uint32_t* layers, const int2* table, const uint16_t* hidden,
                                uint16_t* carried, int count, int main, int width) {
    decide::settle(state, kv, layers, table, hidden, carried, count, main, width);
}
KERNEL(look_up, decide::THREADS)(const uint32_t* state, const uint32_t* history, uint32_t* drafts, int main) {
    decide::look_up(state, history, drafts, main);
}

KERNELS(EXPORT(best_token), EXPORT(score), EXPORT(place_rows), EXPORT(accept), EXPORT(settle), EXPORT(look_up))
