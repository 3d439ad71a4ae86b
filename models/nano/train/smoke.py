"""Step `smoke`: all steps end to end on tiny settings, in minutes, and a check of what they leave.

It shows that the recipe runs, not that the model is good: 100 instead of 2150 training steps.
"""
import json
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from .distill import draft
from .drafter import load_drafter
from .evaluate import evaluate
from .export import export, load_target
from .files import SPLITS, CheckFailure, load_sequences, read_jsonl
from .golden import golden, missing_transformers
from .prepare import prepare
from .prompts import PROMPTS, RECORDS
from .tokenizer import BOS, VOCABULARY, encode, load_tokenizer
from .training import train

MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja", "assistant/model.safetensors", "assistant/config.json",
               "assistant/generation_config.json")


def check(condition, what):
    if not condition:
        raise CheckFailure(f"this does not hold: {what}")
    print(f"smoke: ok: {what}", flush=True)


@contextmanager
def timed(step):
    print(f"smoke: == {step}", flush=True)
    start = time.time()
    yield
    print(f"smoke: == {step} took {time.time() - start:.0f} s", flush=True)


def check_prepared(work):
    tokenizer = load_tokenizer(work / "tokenizer.json", "prepare")
    check(tokenizer.get_vocab_size() == VOCABULARY, f"the tokenizer has {VOCABULARY} ids")
    check(all(load_sequences(work / f"{split}.npz")[0][0] == BOS for split in SPLITS), "all splits begin with <bos>")
    counts = {name: len(read_jsonl(work / f"prompts/{name}.jsonl")) for name in ("public", "heldout", "ppl")}
    check(counts == {"public": PROMPTS, "heldout": PROMPTS, "ppl": RECORDS}, f"prompt files hold {counts} records")


def check_model(out):
    missing = [name for name in MODEL_FILES if not (out / name).is_file()]
    check(not missing, f"all {len(MODEL_FILES)} model files are written" + (f", but {missing}" if missing else ""))
    target = load_target(out)
    load_drafter(out, target.config)
    text = "The state of the Union is strong."
    tokenizer = load_tokenizer(out / "tokenizer.json", "export")
    decoded = tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False)
    check(decoded == text, "target, drafter and tokenizer load again")


def check_figures(work):
    result = json.loads((work / "eval.json").read_text(encoding="utf-8"))
    ppl, unigram = result["target"]["ppl"], result["target"]["ppl_unigram"]
    check(ppl < unigram, f"perplexity {ppl} is below the unigram baseline {unigram}")
    rounds = [result["drafter"][name]["K=4"]["centroids"]["rounds"] for name in ("public", "heldout")]
    check(sum(rounds) > 0, f"acceptance was measured over {rounds} rounds")


def check_golden(out):
    path = out / "golden.safetensors"
    check(path.is_file(), "the reference outputs are written")
    with safe_open(path, "pt") as arrays:
        names = set(arrays.keys())
    wanted = {"seq0.logits", "gen0.tokens", "gen0.margin", "episode0.hf.drafts", "episode0.hf.accepted"}
    check(wanted <= names, f"the reference outputs load again, {len(names)} arrays")


def run_steps(corpus, folder, seed, threads):
    work, out = folder / "work", folder / "out"
    with timed("prepare"):
        prepare(corpus, work, seed)
    check_prepared(work)
    with timed("train"):
        train(work, steps=100, rows_per_batch=8, short=.95, intermediate=192, seed=seed, threads=threads)
    with timed("export"):
        export(work, out)
    with timed("draft"):
        draft(work, out, steps=16, rows_per_batch=8, generate=128, unroll=5, seed=seed, threads=threads)
    check_model(out)
    with timed("evaluate"):
        evaluate(work, out, "all", None, [], limit=8, threads=threads, records=16, most_removed=2)
    check_figures(work)
    problem = missing_transformers()
    if problem:
        print(f"smoke: golden: skipped, because {problem}", flush=True)
        return
    with timed("golden"):
        golden(work, out, None, threads, texts=2, episodes=1)
    check_golden(out)


def smoke(corpus, work, seed, threads):
    """Run in `work`, or without one in a temporary folder that is removed afterwards."""
    start = time.time()
    if work:
        run_steps(corpus, Path(work), seed, threads)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_steps(corpus, Path(folder), seed, threads)
    print(f"smoke: all checks passed in {time.time() - start:.0f} s", flush=True)
