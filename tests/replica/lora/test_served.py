"""Adapters as clients ask for them: at native replicas in processes of their own, and at the router before them."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_native_prefill import Beside
from tests.replica.lora.adapters import adapted_logits, saved_adapter
from tests.replica.models import saved
from tests.replica.natives import SMALL, Native, completion, native, refused
from tests.router.loopback import until
from tests.router.scripted import Served, connect, served

MODEL = "qwen3"
ADAPTERS = {"first": "attention", "sql": "all"}
PROMPT = list(range(20, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name in ("all", "attention"):
        saved_adapter(MODEL, name, made)
    return made


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[Native]]:
    options = [*SMALL, "--events", "--events-port", 0, "--log-level", "info"]
    for name, adapter in ADAPTERS.items():
        options += ["--lora-modules", f"{name}={saved_adapter(MODEL, adapter, folder)}"]
    with native(saved(MODEL, folder), *options) as one, native(saved(MODEL, folder), *options) as other:
        yield [one, other]


@pytest.fixture
def replica(replicas: list[Native]) -> Native:
    return replicas[0]


def assert_is_peft(adapter: str, prompt: Sequence[int], choice: Any) -> None:
    said = adapted_logits(MODEL, adapter, [*prompt, *choice["token_ids"][:-1]])[len(prompt) - 1 :]
    assert choice["token_ids"] == said.argmax(-1).tolist()


def names_at(replica: Native) -> dict[str, str | None]:
    """The models that it lists, and those that they are adapters of."""
    return {model["id"]: model.get("parent") for model in replica.get("/v1/models").json["data"]}


def test_it_is_asked_for_as_a_model(replica: Native) -> None:
    assert names_at(replica) == {"model": None, "first": "model", "sql": "model"}
    assert replica.get("/v1/models/first").json["parent"] == "model"
    answer = replica.post("/v1/completions", completion(PROMPT, model="first"))
    assert answer.json["model"] == "first"
    assert_is_peft("attention", PROMPT, answer.json["choices"][0])
    chat = {"model": "first", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert replica.post("/v1/chat/completions", chat).json["model"] == "first"
    unknown = replica.post("/v1/completions", completion(PROMPT, model="none"))
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert '"first"' in unknown.error["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["sql"], "a name of at most 256 characters and a folder"),
        (["=x"], "a name of at most"),
        (["sql=missing"], "is not a folder"),
        (["model=."], "given twice"),
        (["a=.", "a=."], "given twice"),
    ],
)
def test_mistakes_at_the_start_are_explained(folder: Path, options: list[str], said: str) -> None:
    given = [word for option in options for word in ("--lora-modules", option)]
    status, explained = refused("--model", saved(MODEL, folder), "--served-model-name", "model", *given)
    assert status != 0
    assert said in explained
    assert "Traceback" not in explained


# ---- behind a router


@asynccontextmanager
async def routed(replicas: list[Native]) -> AsyncIterator[Served]:
    beside: Any = [Beside(f"replica-{number}", replica) for number, replica in enumerate(replicas)]
    async with served(*beside, policy="cost", health_interval_s=0.1) as running:
        yield running


async def test_a_router_predicts_its_hits(replicas: list[Native]) -> None:
    asked = PROMPT[::-1]
    async with routed(replicas) as running, connect(running.port) as client:

        def known() -> int:
            """The blocks of both replicas; none before all are known."""
            router = running.router
            states = [(member, member.feed_state) for member in router.members]
            if not all(state.exact for _, state in states):
                return 0
            return 1 + sum(sum(router.placement.index.blocks(member.slot).values()) for member, _ in states)

        def is_known(blocks: int) -> bool:
            return known() == blocks

        await until(known, "the events are followed")
        before = known()
        for stored, (name, adapter) in enumerate(ADAPTERS.items()):
            for again in range(2):
                wanted = before + 5 * (stored + again)
                await until(partial(is_known, wanted), "all events have come")
                answer = await client.post("/v1/completions", completion(asked, model=name))
                assert answer.status == 200, answer.body
                assert_is_peft(adapter, asked, json.loads(answer.body)["choices"][0])
                await running.idle()
        decisions = [one.record() for one in running.router.history.decisions]
        assert all(one.prediction_exact for one in decisions), [one.why_inexact for one in decisions]
        assert [one.predicted_cached_tokens for one in decisions] == [0, 64, 0, 64]
        assert [one.reported_cached_tokens for one in decisions] == [0, 69, 0, 69], "and the beginning of a block"
        assert [one.chosen for one in decisions[::2]] == [one.chosen for one in decisions[1::2]]
