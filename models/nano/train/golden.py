"""Step `golden`: reference outputs of transformers -> OUT/golden.safetensors, and how this package compares with them.

fp32, eager attention, weights as stored. The names of the arrays are explained in MODEL_CARD.md. What the comparison
finds goes to W/golden.json.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .acceptance import accepted_at
from .config import SLIDING
from .decoding import greedy
from .drafter import DRAFTS, load_drafter
from .export import load_target
from .files import CheckFailure, InputError, load_sequences, need, read_jsonl, write_json
from .tokenizer import PAD

SEQUENCES = 2         # teacher-forced sequences whose logits are kept
LENGTH = 200          # of each
NEW_TOKENS = 64       # of a greedy text, stop ids ignored
ASSISTED_TOKENS = 96
NEAR_TIE = 4e-3       # a prompt with a smaller margin on its greedy path is no reference: rounding decides there


def missing_transformers():
    """Why this step cannot run here, or None."""
    try:
        from transformers import Gemma4AssistantForCausalLM, Gemma4ForConditionalGeneration  # noqa: F401
    except ImportError as error:
        return (f"transformers with Gemma 4 and its assistant cannot be imported ({error}): "
                "run `pip install -r train/requirements.txt` first")
    return None


class Reference:
    """Target, drafter and tokenizer as transformers loads them from OUT."""

    def __init__(self, out):
        from transformers import AutoTokenizer, Gemma4AssistantForCausalLM, Gemma4ForConditionalGeneration
        self.target = self.load(Gemma4ForConditionalGeneration, out)
        self.drafter = self.load(Gemma4AssistantForCausalLM, out / "assistant")
        self.tokenizer = AutoTokenizer.from_pretrained(out)
        self.embedding = self.target.get_input_embeddings()
        self.window = self.target.config.text_config.sliding_window
        self.drafter.generation_config.num_assistant_tokens = DRAFTS
        self.drafter.generation_config.num_assistant_tokens_schedule = "constant"

    @staticmethod
    def load(model_class, folder):
        model, info = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                  output_loading_info=True)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[problem]:
                raise CheckFailure(f"{folder}: {problem} {info[problem]}")
        return model.eval()

    def run(self, ids):
        return self.target(torch.tensor([ids]), return_shared_kv_states=True, output_hidden_states=True)

    def generate(self, ids, new, **options):
        """Greedy generation with the target's stop ids unless `options` say otherwise."""
        x = torch.tensor([ids])
        return self.target.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=new, do_sample=False,
                                    **options)

    def draft(self, sequence):
        """One round of drafts after `sequence`: (ids, smallest top-1 minus top-2 logit)."""
        result = self.run(sequence[:-1])
        position = len(sequence) - 2
        kv = dict(result.shared_kv_states)
        keys, values = kv[SLIDING]
        kv[SLIDING] = (keys[:, :, -(self.window + 1):], values[:, :, -(self.window + 1):])
        token = sequence[-1]
        state = result.hidden_states[-1][:, position:position + 1]
        drafts, margins = [], []
        for _ in range(DRAFTS):
            embedded = self.embedding(torch.tensor([[token]]))
            step = self.drafter(inputs_embeds=torch.cat([embedded, state], -1), shared_kv_states=kv, use_cache=False,
                                position_ids=torch.tensor([[position + 1]]))
            best = step.logits[0, 0].topk(2).values
            margins.append((best[0] - best[1]).item())
            token = int(step.logits.argmax())
            state = step.last_hidden_state
            drafts.append(token)
        return drafts, min(margins)


def add_logits(arrays, reference, target, work):
    """Teacher-forced logits of passages of the ppl split; returns the largest difference to this package's model."""
    passages = [p.tolist()[:LENGTH] for p in load_sequences(work / "ppl.npz") if len(p) >= LENGTH][:SEQUENCES]
    difference = 0.
    for i, ids in enumerate(passages):
        logits = reference.run(ids).logits[0]
        arrays[f"seq{i}.tokens"] = torch.tensor(ids)
        arrays[f"seq{i}.logits"] = logits
        own = target.logits(target.hidden(torch.tensor([ids]))[0])[0]
        difference = max(difference, (logits - own).abs().max().item())
    return difference


def choose_prompts(records, reference, target, count):
    """The first `count` prompts without a near-tie on the greedy path: [(id, token ids)]."""
    chosen = []
    for record in records:
        if len(chosen) == count:
            break
        ids = reference.tokenizer(record["prompt"]).input_ids
        (_, margins), = greedy(target, [ids], NEW_TOKENS, stop=())
        if min(margins) > NEAR_TIE:
            chosen.append((record["id"], ids))
    if len(chosen) < count:
        raise InputError(f"only {len(chosen)} of {len(records)} prompts have no near-tie, {count} are needed: run "
                         "`python -m train train` with more steps first")
    return chosen


def add_greedy(arrays, name, reference, ids):
    """A greedy text with the runner-up of each token; returns its tokens [NEW_TOKENS]."""
    result = reference.generate(ids, NEW_TOKENS, eos_token_id=-1, pad_token_id=PAD, return_dict_in_generate=True,
                                output_logits=True)
    top = torch.stack(result.logits)[:, 0].float().topk(2, -1)
    tokens = result.sequences[0, len(ids):].clone()
    arrays[f"{name}.prompt"] = torch.tensor(ids)
    arrays[f"{name}.tokens"] = tokens
    arrays[f"{name}.second"] = top.indices[:, 1]
    arrays[f"{name}.top1"] = top.values[:, 0]
    arrays[f"{name}.top2"] = top.values[:, 1]
    arrays[f"{name}.margin"] = top.values[:, 0] - top.values[:, 1]
    return tokens


def add_episode(arrays, name, reference, ids, tokens):
    """A whole speculative run, stop ids ignored. Returns (sequence, accepted drafts per round, smallest margin)."""
    sequence = ids + [tokens[0].item()]  # the first token comes from the prefill and belongs to no round
    rounds, accepted, margins = [], [], []
    while len(sequence) - len(ids) < NEW_TOKENS:
        drafts, margin = reference.draft(sequence)
        best = reference.run(sequence + drafts).logits[0, len(sequence) - 1:].argmax(-1).tolist()
        count = 0
        while count < DRAFTS and drafts[count] == best[count]:
            count += 1
        rounds.append(drafts)
        accepted.append(count)
        margins.append(margin)
        sequence += best[:count + 1]
    if sequence[len(ids):][:NEW_TOKENS] != tokens.tolist():
        raise CheckFailure(f"{name}: the speculative run differs from the greedy text")
    arrays[f"{name}.prompt"] = torch.tensor(ids)
    arrays[f"{name}.tokens"] = tokens.clone()
    arrays[f"{name}.hf.drafts"] = torch.tensor(rounds)
    arrays[f"{name}.hf.accepted"] = torch.tensor(accepted)
    return sequence, accepted, min(margins)


def rounds_agree(target, drafter, sequence, anchor, accepted):
    """Whether this package's drafter is accepted as often in every round that lies wholly inside the sequence."""
    own = accepted_at(target, drafter, [sequence + [PAD]], DRAFTS, True)[0]
    agree = True
    for count in accepted:
        inside = anchor + DRAFTS + 2 <= len(sequence)
        agree = agree and (not inside or int(own[anchor]) == count)
        anchor += count + 1
    return agree


@torch.no_grad()
def golden(work, out, prompts, threads, texts=8, episodes=4):
    """`texts` greedy texts, the first `episodes` of them also as speculative runs."""
    work, out = Path(work), Path(out)
    need(work, "prepare")
    prompts = Path(prompts) if prompts else work / "prompts"
    torch.set_num_threads(threads)
    target = load_target(out)
    drafter = load_drafter(out, target.config)
    records = read_jsonl(prompts / "public.jsonl")
    problem = missing_transformers()
    if problem:
        raise InputError(problem)
    reference = Reference(out)

    arrays = {}
    info = {"max_logit_difference_to_this_package": add_logits(arrays, reference, target, work),
            "min_margin": [], "same_as_assisted_generate": [], "episodes": []}
    chosen = choose_prompts(records, reference, target, texts)
    for i, (name, ids) in enumerate(chosen):
        tokens = add_greedy(arrays, f"gen{i}", reference, ids)
        info["min_margin"].append(round(arrays[f"gen{i}.margin"].min().item(), 5))
        plain = reference.generate(ids, ASSISTED_TOKENS)
        assisted = reference.generate(ids, ASSISTED_TOKENS, assistant_model=reference.drafter)
        info["same_as_assisted_generate"].append(plain.tolist() == assisted.tolist())
        if i < episodes:
            sequence, accepted, margin = add_episode(arrays, f"episode{i}", reference, ids, tokens)
            info["episodes"].append({
                "prompt": name, "rounds": len(accepted), "accepted": sum(accepted),
                "min_draft_margin": round(margin, 5),
                "this_package_agrees": rounds_agree(target, drafter, sequence, len(ids) - 1, accepted)})
    info["prompts"] = [name for name, _ in chosen]
    chat = reference.tokenizer.apply_chat_template([{"role": "user", "content": records[0]["prompt"]}],
                                                   add_generation_prompt=True, return_dict=False)
    info["chat_example"] = reference.tokenizer.decode(reference.generate(chat, ASSISTED_TOKENS)[0])

    save_file({name: array.contiguous() for name, array in arrays.items()}, out / "golden.safetensors",
              metadata={"format": "pt"})
    write_json(work / "golden.json", info, indent=1)
    print(json.dumps(info, indent=1), flush=True)
