"""Compare the greedy tokens of a published checkpoint, SmolLM2-135M-Instruct as GGUF, with those of transformers.

In float32, for 50 prompts of up to 4,000 tokens of this repository, in every way in which our engine computes or finds
them; and the perplexity of a page of the docs. Transformers reads the same file by itself. This takes some 15 minutes
of an idle machine.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from api.tokens.tokenizer import HfTokenizer
from tests.bench.measure import heading, row
from tests.replica import smollm2
from tests.replica.checkpoint import WAYS, compared, perplexities, said
from tests.replica.model.gguf.test_tokenizer import TEXTS

ROOT = Path(__file__).resolve().parents[2]
CODE = ("replica/*.py", "router/dashboard/static/js/*.js", "k8s/**/*.yaml", "Makefile")
PROSE = ("docs/*.md",)
LENGTHS = {64: 20, 256: 18, 512: 7, 1000: 3, 2000: 1, 4000: 1}  # tokens, and how many prompts have so many
FEW = {64: 2, 256: 1}
NEW = 8
TEXT = 2000


def run(rounds: int, *, small: bool = False) -> None:  # noqa: ARG001
    """One round: the tokens are the same each time."""
    lengths = FEW if small else LENGTHS
    folder = smollm2.folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    tokenizer = HfTokenizer(folder)
    prompts = prompts_of(tokenizer, lengths)
    text = tokenizer.encode((ROOT / "docs/architecture.md").read_text(), add_special_tokens=False)[
        : max(lengths) if small else TEXT
    ]
    found = said(folder, prompts, text, NEW)
    answers = compared(model, prompts, found)
    ways = WAYS
    title = f"prompts, and their greedy tokens (of {NEW} each) that are transformers'"
    print(f"| {' | '.join((title, *ways, 'least margin'))} |")
    print("| --- |" + " --- |" * (len(ways) + 1))
    ends = [0, *accumulate(lengths.values())]
    for length, (first, last) in zip(lengths, pairwise(ends), strict=True):
        same = [sum(answer.same[way] for answer in answers[first:last]) for way in ways]
        margin = min(answer.margin for answer in answers[first:last])
        print(f"| {last - first} of {length:,} tokens | {' | '.join(map(str, same))} | {margin:.2g} |")
    ours, theirs = perplexities(model, text, found)
    heading(f"perplexity of {len(text):,} tokens of the docs")
    row("ours", [ours], "")
    row("transformers'", [theirs], "")
    row("difference", [abs(ours / theirs - 1)], "of it", "<= 0.001")


def prompts_of(tokenizer: HfTokenizer, lengths: Mapping[int, int]) -> list[list[int]]:
    """Take the first text that is long enough, and each once: languages, then docs and code in turn."""
    docs, code = (sorted(file for pattern in kind for file in ROOT.glob(pattern)) for kind in (PROSE, CODE))
    files = [file.read_text() for pair in zip(docs, code, strict=False) for file in pair]
    texts = [*(text * 8 for text in TEXTS), *files]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prompts = []
    for length, count in lengths.items():
        for _ in range(count):
            chosen = next(tokens for tokens in encoded if len(tokens) >= length)
            encoded.remove(chosen)
            prompts.append(chosen[:length])
    return prompts
