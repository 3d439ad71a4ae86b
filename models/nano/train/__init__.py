"""The recipe of "nano", a very small language model with the Gemma 4 text architecture, and of its drafter.

Run a step with `python -m train STEP` from the folder that holds this package; `--help` lists the steps.
Reading order: corpus, tokenizer, prompts, prepare (data); config, layers, model, optimizer, training, export (target);
decoding, drafter, distill (drafter); perplexity, acceptance, evaluate, golden (figures); smoke (all of it, tiny).

Names used in shapes throughout: B sequences, T positions, V vocabulary, H hidden size, L layers, P per-layer input
size, D head size, K drafted tokens in a round.
"""
