"""Step `evaluate`: perplexity, int4, layer removal and acceptance of the exported model. Writes W/eval.json."""
import json
import math
from pathlib import Path

import torch

from .acceptance import evaluate_drafter
from .drafter import load_drafter
from .export import load_target
from .files import InputError, load_ids, load_sequences, need, read_jsonl, write_json
from .perplexity import baselines, int4_weights, nll_records, nll_split, percent
from .tokenizer import load_tokenizer

# name in eval.json, inputs of a group, whether the embedding tables are rounded too
INT4_VARIANTS = (("linears g32", 32, False), ("linears g64", 64, False), ("linears and embeddings g32", 32, True))
SPLIT_STRIDE = 4    # every fourth passage of the ppl split is scored as a whole
MOST_REMOVED = 7
LARGEST_LOSS = 8    # percent; the search for removable layers ends there
SEARCH_WIDTH = 4


def evaluate_perplexity(target, records, train_ids, sequences):
    """Perplexity of the model and of the baselines, and the negative log-likelihood all changes are measured from."""
    base = nll_records(target, records)
    figures = {
        "records": len(records),
        "target_tokens": sum(len(record["target_token_ids"]) for record in records),
        "ppl": round(math.exp(base), 3),
        **baselines(train_ids, records, target.config.vocab_size),
        "ppl_quarter_split": round(math.exp(nll_split(target, sequences[::SPLIT_STRIDE])), 3),
    }
    return figures, base


def evaluate_int4(target, records, base):
    changes = {}
    for name, group, tables in INT4_VARIANTS:
        with int4_weights(target, group, tables):
            changes[name] = percent(nll_records(target, records), base)
    return changes


def remove_one(target, records, base):
    """The cost of every layer alone."""
    config = target.config
    results = []
    for i, layer in enumerate(target.model.layers):
        results.append({
            "layer": i,
            "type": config.layer_types[i],
            "kv_shared": layer.shared,
            "kv_source": i in config.kv_source.values(),
            "percent": percent(nll_records(target, records, (i,)), base),
        })
        print(json.dumps(results[-1]), flush=True)
    return results


def remove_greedily(target, records, single, most):
    """Remove layer after layer, each time the best of the few that are cheapest alone.

    The search sees one half of the records, the figures that count come from the other. K/V sources and the last layer
    stay.
    """
    last = target.config.num_hidden_layers - 1
    half = len(records) // 2
    searched, unseen = records[:half], records[half:]
    searched_base = nll_records(target, searched)
    unseen_base = nll_records(target, unseen)
    order = sorted((r["percent"], r["layer"]) for r in single if not r["kv_source"] and r["layer"] != last)
    removed, path = (), []
    while len(path) < most:
        candidates = [i for _, i in order if i not in removed][:SEARCH_WIDTH]
        nll, best = min((nll_records(target, searched, removed + (i,)), i) for i in candidates)
        removed += (best,)
        path.append({
            "removed": list(removed),
            "percent_search_half": percent(nll, searched_base),
            "percent_other_half": percent(nll_records(target, unseen, removed), unseen_base),
        })
        print(json.dumps(path[-1]), flush=True)
        if path[-1]["percent_other_half"] > LARGEST_LOSS:
            break
    with int4_weights(target, 32):
        base = nll_records(target, unseen)
        int4 = [percent(nll_records(target, unseen, tuple(step["removed"])), base) for step in path]
    return path, int4


def evaluate_target(target, work, prompts, limit, most_removed):
    records = read_jsonl(prompts / "ppl.jsonl")[:limit]
    sequences = load_sequences(work / "ppl.npz")[:limit]
    figures, base = evaluate_perplexity(target, records, load_ids(work / "train.npz"), sequences)
    print(json.dumps(figures), flush=True)
    figures["int4_percent"] = evaluate_int4(target, records, base)
    print(json.dumps(figures["int4_percent"]), flush=True)
    figures["remove_one"] = remove_one(target, records, base)
    path, int4 = remove_greedily(target, records, figures["remove_one"], most_removed)
    figures["greedy_removal"] = path
    figures["greedy_removal_int4_g32_other_half"] = int4
    figures["layer_scalar"] = [round(layer.layer_scalar.item(), 4) for layer in target.model.layers]
    return figures


def prompt_files(prompts, more):
    """{name: path} of the prompt files; `more` is a list of NAME=FILE."""
    files = {name: prompts / f"{name}.jsonl" for name in ("public", "heldout")}
    for item in more:
        name, separator, path = item.partition("=")
        if not separator:
            raise InputError(f"--more takes NAME=FILE, not {item}")
        if not Path(path).exists():
            raise InputError(f"the prompt file {path} does not exist")
        files[name] = path
    return files


def evaluate(work, out, part, prompts, more, limit, threads, records=None, most_removed=MOST_REMOVED):
    """`part` is all, target or drafter; figures of the other part are kept in W/eval.json.

    `limit` prompts of each file are used. `records` (all if None) and `most_removed` exist to make a quick run.
    """
    work, out = Path(work), Path(out)
    need(work, "prepare")
    prompts = Path(prompts) if prompts else work / "prompts"
    torch.set_num_threads(threads)
    target = load_target(out)
    if part in ("all", "drafter"):  # read first: the figures of the target take minutes
        tokenizer = load_tokenizer(out / "tokenizer.json", "export")
        drafter = load_drafter(out, target.config)
        files = {name: read_jsonl(file)[:limit] for name, file in prompt_files(prompts, more).items()}
    path = work / "eval.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if part in ("all", "target"):
        result["target"] = evaluate_target(target, work, prompts, records, most_removed)
    if part in ("all", "drafter"):
        result["drafter"] = {}
        for name, chosen in files.items():
            figures = evaluate_drafter(target, drafter, chosen, tokenizer)
            result["drafter"][name] = figures
            print(name, json.dumps({key: value for key, value in figures.items() if key != "samples"}), flush=True)
    write_json(path, result, indent=1)
