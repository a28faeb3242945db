"""The other side of the agents: a router before two simulated replicas of each model, which answer from a script."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qualification.clients.serving import QUIET, REPLICAS, Serving
from qualification.clients.verdicts import Check
from tests.chaos.replicas import Command, command
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until

ANSWERS = Path(__file__).with_name("answers.jsonl")
MODELS = ("demo", "gpt-5.5")  # Codex offers its patches to models that it knows
# A token is a byte, and the agents' prompts are long; predictions count whole blocks.
SIZE = ("--max-model-len", 262_144, "--num-blocks", 65_536, "--set=partial_reuse=false")
FAST = ("--set=simulated_prefill_tokens_per_s=1e7", "--set=simulated_decode_tokens_per_s=2000")
TURNS = 2  # of each agent at least: a call, and an answer to its result
REUSED = 0.5  # of a later turn's prompt at least: nearly all that the turn before had


class Scripted(Serving):
    """Servers whose router keeps a log of the requests."""

    def __init__(self, front: RouterProcess, replicas: list[Command], log: Path) -> None:
        super().__init__(Path(), front, replicas)
        self._log = log
        self._told = 0

    def new_checks(self) -> tuple[Check, ...]:
        """Check the servers' logs, and that every hit was as long as predicted."""
        wait_until(lambda: len(self._lines()) >= self._told + TURNS, "the requests are in the log")
        new, self._told = self._lines()[self._told :], len(self._lines())
        return (*super().new_checks(), hits(new))

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []


def hits(requests: list[dict[str, Any]]) -> Check:
    """Compare the cached tokens of each request with the prediction; a later turn has to find the earlier ones."""
    name = "hits are as predicted"
    told = [(line.get("predicted_tokens", 0), line.get("cached_tokens", 0), line["prompt_tokens"]) for line in requests]
    found = "; ".join(f"{predicted:,} predicted, {cached:,} found of {prompt:,}" for predicted, cached, prompt in told)
    is_reused = any(cached > REUSED * prompt for _, cached, prompt in told)
    if not is_reused or any(predicted != cached for predicted, cached, _ in told):
        return Check(name, error=found)
    return Check(name, found=found)


@contextmanager
def served(_: Path) -> Iterator[Scripted]:
    """Run a router before two replicas of each model."""
    options = ("--simulated-answers", ANSWERS, "--tool-call-parser", "hermes", *SIZE, *FAST)
    with ExitStack() as stack:
        log = Path(stack.enter_context(TemporaryDirectory())) / "requests.jsonl"
        replicas = [
            stack.enter_context(command(*options, *QUIET, "--served-model-name", model, ready=False))
            for model in MODELS
            for _ in range(REPLICAS)
        ]
        for replica in replicas:
            replica.wait_ready()
        named = [text for replica in replicas for text in ("--replica", replica.url)]
        yield Scripted(stack.enter_context(router(*named, *QUIET, "--request-log", log)), replicas, log)
