"""Command line: `python -m train STEP`. The defaults are the settings the published weights were made with."""
import argparse
import importlib
import sys

from . import __doc__ as about


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def share(text):
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


def add_corpus(parser):
    parser.add_argument("--corpus", required=True, metavar="DIR",
                        help="folder with the two .tgz packages of the corpus, or with both unpacked")


def add_work(parser):
    parser.add_argument("--work", required=True, metavar="W", help="folder of what the steps hand to each other")


def add_out(parser):
    parser.add_argument("--out", required=True, metavar="OUT", help="folder of the published model")


def add_seed(parser):
    parser.add_argument("--seed", type=int, default=1)


def add_threads(parser):
    parser.add_argument("--threads", type=positive, default=2)


def add_prompts(parser):
    parser.add_argument("--prompts", metavar="DIR", help="folder of the prompt files (default W/prompts)")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m train", description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")

    step = steps.add_parser("prepare", help="text -> splits, passages, tokenizer, token arrays, prompts, in W")
    add_corpus(step)
    add_work(step)
    add_seed(step)

    step = steps.add_parser("train", help="train the target -> W/target.pt")
    add_work(step)
    step.add_argument("--steps", type=positive, default=2150)
    step.add_argument("--rows", type=positive, default=8, dest="rows_per_batch")
    step.add_argument("--short", type=share, default=.6,
                      help="share of the steps with rows of 128 instead of 256 tokens")
    step.add_argument("--intermediate", type=positive, default=192, help="inner size of the MLP")
    add_seed(step)
    add_threads(step)

    step = steps.add_parser("export", help="W/target.pt -> OUT: bf16 weights, config, tokenizer")
    add_work(step)
    add_out(step)

    step = steps.add_parser("draft", help="train the drafter for OUT's weights -> OUT/assistant")
    add_work(step)
    add_out(step)
    step.add_argument("--steps", type=positive, default=240)
    step.add_argument("--rows", type=positive, default=8, dest="rows_per_batch")
    step.add_argument("--generate", type=positive, default=384,
                      help="number of greedy continuations to learn from, in whole batches of 128")
    step.add_argument("--unroll", type=positive, default=5, help="drafts in a row that are trained together")
    add_seed(step)
    add_threads(step)

    step = steps.add_parser("evaluate", help="perplexity, int4, layer removal, acceptance -> W/eval.json")
    add_work(step)
    add_out(step)
    step.add_argument("--part", default="all", choices=["all", "target", "drafter"])
    step.add_argument("--limit", type=positive, default=80, help="prompts used of each file")
    add_prompts(step)
    step.add_argument("--more", action="append", default=[], metavar="NAME=FILE",
                      help="further prompt files for the acceptance figures")
    add_threads(step)

    step = steps.add_parser("golden", help="reference outputs of transformers -> OUT/golden.safetensors")
    add_work(step)
    add_out(step)
    add_prompts(step)
    add_threads(step)

    step = steps.add_parser("smoke", help="all steps on tiny settings, in minutes, with checks")
    add_corpus(step)
    step.add_argument("--work", metavar="W",
                      help="folder to leave the results in (default: a temporary one, removed at the end)")
    add_seed(step)
    add_threads(step)
    return parser.parse_args(arguments)


# Steps whose function lives in a module of another name.
MODULES = {"train": "training", "draft": "distill"}


def main():
    options = vars(parse(sys.argv[1:]))
    step = options.pop("step")
    try:
        # imported only now, so that --help needs no packages
        module = importlib.import_module(f".{MODULES.get(step, step)}", __package__)
    except ModuleNotFoundError as error:
        print(f"error: {error}: run `pip install -r train/requirements.txt` first", file=sys.stderr)
        return 2
    from .files import CheckFailure, InputError
    try:
        getattr(module, step)(**options)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CheckFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
