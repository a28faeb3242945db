"""Compilers of constraints: CPU time to compile and for a mask, and what free requests in the same batch lose.

xgrammar is no part of the project; it is measured beside llguidance where it is installed.
"""

import json
import random
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from api.openai.constraints import Constraint, calls_schema
from events.blocks import pack_tokens
from replica.engine.engine import Engine
from replica.grammar.compiler import Compiler, grammar_of, matcher_of
from replica.grammar.matcher import Matcher, boolean
from replica.grammar.vocabulary import Vocabulary
from replica.messages import Sampling, Submit
from replica.model.demo import demo_folder
from replica.runners import sampling as sampling_module
from replica.runners.request import Request
from tests.replica.grammar.constraints import WEATHER, tokenizer, vocabulary
from tests.replica.models import native

VOCABULARIES = (32_000, 152_000)
LONGEST_PIECE = 16
STEPS = 400
BATCH = 8  # of each kind
ROUND_STEPS = 200


def _tool(number: int) -> dict[str, Any]:
    fields = {f"field_{index}": {"type": kind} for index, kind in enumerate(("string", "integer", "boolean", "number"))}
    parameters = {"type": "object", "properties": fields, "required": list(fields)[:2], "additionalProperties": False}
    return {"name": f"tool_{number}", "parameters": parameters}


def _schema(schema: object) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


CONSTRAINTS = {
    "small schema": _schema(WEATHER),
    "20 tools, required": _schema(calls_schema([_tool(number) for number in range(20)])),
    "any object": Constraint("json_object", ""),
    "100 choices": Constraint("choice", json.dumps([f"choice number {number}" for number in range(100)])),
    "expression": Constraint("regex", r"[a-z]{3,20}@[a-z]{3,20}\.(com|org)"),
}


class Figures(NamedTuple):
    compile_ms: float
    masks_us: list[float]


def run(rounds: int) -> None:
    pieces = _pieces()
    for size in VOCABULARIES:
        tokens = [bytes([byte]) for byte in range(256)] + pieces[: size - 257] + [b"<|end|>"]
        _compare(Vocabulary(tokens, (size - 1,), (size - 1,)), rounds)
    _beside_free_ones(rounds)


def _pieces() -> list[bytes]:
    """Common beginnings of words in Python's own library: as many as a large vocabulary has."""
    counts: Counter[bytes] = Counter()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts:
            for word in re.findall(rb" ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+", file.read_bytes()):
                counts.update(word[:end] for end in range(2, min(len(word), LONGEST_PIECE) + 1))
    return [piece for piece, _ in counts.most_common(max(VOCABULARIES))]


def _compare(vocabulary: Vocabulary, rounds: int) -> None:
    began_s = time.perf_counter()
    compiler = Compiler(vocabulary)
    print(f"\n{len(vocabulary.tokens):,} tokens; llguidance reads them in {time.perf_counter() - began_s:.2f} s")
    others = _xgrammar(vocabulary) if find_spec("xgrammar") else None
    print("| constraint | compiler | compile, ms | mask and token, us: mean | p99 | most |\n" + "| --- " * 6 + "|")
    for name, constraint in CONSTRAINTS.items():
        answer = _answer(compiler, vocabulary, constraint)
        _row(name, "llguidance", [_of_llguidance(compiler, constraint, answer) for _ in range(rounds)])
        if others is not None:
            _row(name, "xgrammar", [others(constraint, answer) for _ in range(rounds)])
    _applying(vocabulary)


def _row(name: str, compiler: str, found: list[Figures]) -> None:
    masks = sorted(mask for figures in found for mask in figures.masks_us)
    compile_ms = statistics.median(figures.compile_ms for figures in found)
    p99 = masks[int(0.99 * len(masks))]
    print(f"| {name} | {compiler} | {compile_ms:.2f} | {statistics.mean(masks):.1f} | {p99:.0f} | {masks[-1]:.0f} |")


def _answer(compiler: Compiler, vocabulary: Vocabulary, constraint: Constraint) -> list[int]:
    matcher = Matcher(compiler.compile(constraint).deep_copy(), vocabulary)
    chance, answer = random.Random(1), list[int]()
    while len(answer) < STEPS:
        allowed = np.flatnonzero(boolean(matcher.allowed(), len(vocabulary.tokens)))
        answer.append(int(chance.choice(allowed)))
        if answer[-1] in vocabulary.eos_ids:
            break
        matcher.follow(answer)
    return answer


def _of_llguidance(compiler: Compiler, constraint: Constraint, answer: list[int]) -> Figures:
    began_s = time.process_time()
    matcher = matcher_of(compiler.tokenizer, grammar_of(constraint))
    compile_ms = (time.process_time() - began_s) * 1e3
    return Figures(compile_ms, list(_timed(answer, matcher.compute_bitmask, matcher.consume_token)))


def _timed(answer: list[int], mask: Callable[[], object], take: Callable[[int], object]) -> Iterator[float]:
    for token in answer:
        began_s = time.process_time()
        mask()
        took = take(token)
        yield (time.process_time() - began_s) * 1e6
        assert took


def _xgrammar(vocabulary: Vocabulary) -> Callable[[Constraint, list[int]], Figures]:
    import xgrammar  # type: ignore[import-not-found]

    began_s = time.process_time()
    info = xgrammar.TokenizerInfo(vocabulary.tokens, stop_token_ids=list(vocabulary.eos_ids))
    print(f"xgrammar reads them in {time.process_time() - began_s:.2f} s")

    def measured(constraint: Constraint, answer: list[int]) -> Figures:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        began_s = time.process_time()
        match constraint.kind:
            case "json_schema":
                compiled = compiler.compile_json_schema(constraint.text, strict_mode=False)
            case "json_object":
                compiled = compiler.compile_builtin_json_grammar()
            case "regex":
                compiled = compiler.compile_regex(constraint.text)
            case _:
                choices = " | ".join(map(json.dumps, json.loads(constraint.text)))
                compiled = compiler.compile_grammar(f"root ::= {choices}")
        compile_ms = (time.process_time() - began_s) * 1e3
        matcher = xgrammar.GrammarMatcher(compiled)
        bits = xgrammar.allocate_token_bitmask(1, len(vocabulary.tokens))
        mask = lambda: matcher.fill_next_token_bitmask(bits)  # noqa: E731
        return Figures(compile_ms, list(_timed(answer, mask, matcher.accept_token)))

    return measured


def _applying(vocabulary: Vocabulary) -> None:
    torch.set_num_threads(1)  # as the engine has it
    size = len(vocabulary.tokens)
    logits, bits = torch.randn(1, size), np.full(-(-size // 32) * 4, 0x5A, np.uint8)
    times: list[float] = []
    for _ in range(STEPS):
        began_s = time.process_time()
        logits.masked_fill_(~torch.from_numpy(boolean(bits, size)), -torch.inf)
        times.append((time.process_time() - began_s) * 1e6)
    print(f"applying a mask to one row of logits on the CPU: {statistics.median(times):.0f} us")


# ---- beside free requests


def beside_free_ones() -> dict[str, Constraint]:
    """Constraints that never end within a round."""
    texts = Constraint("regex", r"[\s\S]{2000,4000}")
    strings = _schema({"type": "array", "items": {"type": "string", "minLength": 30}, "minItems": 100})
    return {"free text of a length": texts, "a list of strings": strings}


def _beside_free_ones(rounds: int) -> None:
    """The share of the masks in the steps of the demo model: all that free requests in the same batch wait longer."""
    folder = demo_folder()
    engine = native(folder, num_blocks=1024, max_model_len=1024, max_num_seqs=2 * BATCH)
    print(f"\nThe demo model ({tokenizer().vocab_size:,} tokens), {BATCH} free and {BATCH} constrained sequences:")
    for name, constraint in beside_free_ones().items():
        shares = [_share_of_masks(engine, constraint) for _ in range(rounds)]
        print(f"{name}: masks are {statistics.median(shares):.2%} of a step ({min(shares):.2%} to {max(shares):.2%})")


def _share_of_masks(engine: Engine, constraint: Constraint) -> float:
    compiled, size = Compiler(vocabulary()).compile(constraint), tokenizer().vocab_size
    for number in range(2 * BATCH):
        matcher = Matcher(compiled.deep_copy(), vocabulary()) if number % 2 else None
        sampling = Sampling(max_tokens=ROUND_STEPS, temperature=1.0, seed=number)
        prompt = pack_tokens([(number * 7 + place) % size for place in range(32)])
        assert engine.submit(Submit(number, prompt, sampling), matcher) is None
    masks_s = 0.0
    rule_out = sampling_module.rule_out

    def timed(logits: torch.Tensor, requests: Sequence[Request]) -> dict[int, torch.Tensor]:
        nonlocal masks_s
        began_s = time.process_time()
        ruled_out = rule_out(logits, requests)
        masks_s += time.process_time() - began_s
        return ruled_out

    sampling_module.rule_out = timed
    try:
        began_s = time.process_time()
        while engine.busy:
            engine.step()
        return masks_s / (time.process_time() - began_s)
    finally:
        sampling_module.rule_out = rule_out
