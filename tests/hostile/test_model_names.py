"""One name on two base models: token ids of one never reach a replica of the other, and whoever looks is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.members.spec import ReplicaSpec
from router.prompts.prompt import read_peek
from tests.api.tokenizers import saved
from tests.api.trained import FAMILIES
from tests.router.loopback import until
from tests.router.scripted import CHAT, MODEL, Scripted, chat, connect, named, served

ADAPTER = "sql"


def native(name: str, base: str, *adapters: str) -> Scripted:
    made = Scripted(name, named(name).handler, native=True, models=[base])
    made.control["/load"][1]["adapters"] = list(adapters)
    return made


def foreign(name: str, base: str, *adapters: str) -> Scripted:
    return Scripted(name, named(name).handler, models=[base, *({"id": one, "parent": base} for one in adapters)])


def asked(replica: Scripted) -> list[str]:
    """The models of the requests that it got."""
    return [(call.native[1] if replica.native else call.json)["model"] for call in replica.calls]


@pytest.mark.parametrize("make", [native, foreign])
async def test_an_adapter_on_two_base_models_belongs_to_the_first(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with served(make("a", "base-1", ADAPTER), make("b", "base-2", ADAPTER)) as running:
        async with connect(running.port) as client:
            for _ in range(4):
                assert (await client.post(CHAT, chat() | {"model": ADAPTER})).status == 200
            assert (await client.post(CHAT, chat() | {"model": "base-2"})).status == 200
        assert (asked(running.replicas["a"]), asked(running.replicas["b"])) == ([ADAPTER] * 4, ["base-2"])
        status = {name: running.front.dashboard.statuses.one(running.member(name)) for name in ("a", "b")}
        assert status["a"].taken_names == {} and status["a"].models == ["base-1", ADAPTER]
        assert status["b"].taken_names == {ADAPTER: "base-1"} and status["b"].models == ["base-2"]
    [said] = [record.message for record in caplog.records if "is not used" in record.message]
    assert said.startswith("b: ") and ADAPTER in said and "base-1" in said


async def test_a_name_goes_over_to_the_other_base_model_once_the_first_has_left() -> None:
    async with served(native("a", "base-1", ADAPTER), native("b", "base-2", ADAPTER)) as running:
        running.replicas["a"].control["/load"][1]["adapters"] = []
        running.router.members.by_name["a"].server.learned = False
        await until(lambda: running.router.members.models[ADAPTER].base == "base-2", "it was asked again")
        assert running.router.members.models[ADAPTER].tokens is running.router.members.models["base-2"].tokens
        assert not running.member("b").taken_names


@pytest.mark.parametrize("adapter_first", [True, False])
async def test_a_base_model_and_an_adapter_of_one_name_are_two(adapter_first: bool) -> None:
    makers = (native("a", "base", MODEL), native("b", MODEL))
    async with served(*(makers if adapter_first else makers[::-1])) as running:
        served_by = running.router.members.models[MODEL]
        assert [member.name for member in served_by.members] == ["a" if adapter_first else "b"]
        assert served_by.lora == (MODEL if adapter_first else None)


async def test_replicas_of_one_base_share_an_adapter_in_whatever_order_they_list_its_names() -> None:
    a = Scripted("a", named("a").handler, models=["m", "alias", {"id": ADAPTER, "parent": "m"}])
    b = Scripted("b", named("b").handler, models=["alias", "m", {"id": ADAPTER, "parent": "alias"}])
    async with served(a, b) as running:
        for name in ("m", "alias", ADAPTER):
            assert len(running.router.members.models[name].members) == 2, name


# ---- engines


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
async def test_whether_prompts_are_exact_does_not_depend_on_which_engine_came_first(
    order: tuple[str, str], tmp_path: Path
) -> None:
    folder = saved(FAMILIES["qwen"](), tmp_path, tokenizer_config={"chat_template": "{{ messages[0].content }}"})
    ours = native("a", MODEL)
    theirs = Scripted("b", named("b").handler, models=[{"id": MODEL, "owned_by": "vllm"}])
    theirs.control |= {"/kv_event_sources": (404, {}), "/metrics": (200, b"")}
    both, body = {"a": ours, "b": theirs}, json.dumps(chat()).encode()
    async with ours.running(), theirs.running():
        specs = tuple(ReplicaSpec(name=name, url=both[name].spec.url) for name in order)
        dirs = {MODEL: str(folder)}
        async with served(*both.values(), replicas=specs, model_dirs=dirs) as running:
            model = running.router.members.models[MODEL]
            assert len(model.members) == 2 and not model.tokens.strict and model.tokens.engine is not None
            await until(lambda: model.tokens.shapes.silent is not None, "no replica says its tokens")
            prompt = model.tokens.draft("chat", body, read_peek(body)).finish()
            assert prompt.exact and prompt.doubt == model.tokens.shapes.silent
