"""Sends each field to a router, and says what became of it: at a replica of ours, or at an engine behind the router."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec

from api.generation_apis import APIS
from qualification.compatibility.probes import BASES, ENDING, Probe, probe_of
from qualification.compatibility.sdk import KINDS, fields, kinds, resolved
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until
from tests.replica.models import saved
from tests.replica.natives import native
from tests.replica.serving import Answer
from tests.router.scripted import MODEL, Scripted, connect, says
from tests.router.scripted import served as routed

DONE, TOLD, IGNORED, REFUSED, PASSED_ON = "done", "told", "ignored", "refused", "passed on"
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages -%}
  <{{ message.role }}>{{ message.reasoning_content or "" }}{{ message.content or "" }}
  {%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
{%- endfor -%}
{{ reasoning_effort }}{{ tone }}{{ enable_thinking }}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""
PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
# What differs between two equal requests, and (of responses) repeats the request.
CHANCE = re.compile(rb'"id":"[^"]*"|"created(?:_at)?":[\d.]+|"completed_at":[\d.]+|"item_id":"[^"]*"')
CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\d+')
OF_ANSWER = ("output", "usage", "status", "incomplete_details")


class Outcome(NamedTuple):
    what: str
    sent: Any


@contextmanager
def served(folder: Path) -> Iterator[RouterProcess]:
    """A router before a replica of a small model, whose template shows all that a request may hand to it."""
    model = saved("llama", folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": list(ENDING)}))
    (model / "generation_config.json").unlink(missing_ok=True)
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ("--served-model-name", "model", "--num-blocks", 256, "--chat-template", folder / "template.jinja")
    with native(model, *options, *PARSERS) as replica, router("--replica", replica.url) as running:
        yield running


def outcomes(served: RouterProcess) -> dict[str, dict[str, Outcome]]:
    """By field, then by API."""
    found: dict[str, dict[str, Outcome]] = {}
    for api in BASES:
        for name in fields(api):
            found.setdefault(name, {})[api] = outcome(served, api, name)
    return found


def outcome(served: RouterProcess, api: str, name: str) -> Outcome:
    probe = _previous(served) if name == "previous_response_id" else probe_of(api, name)
    before = BASES[api] | probe.beside
    sent = before | {name: probe.value}
    path = APIS[api].path
    answer = served.post(path, sent)
    if answer.status in (400, 404):
        assert answer.error["param"].partition("[")[0].partition(".")[0] == name, (api, name, answer.body)
        return Outcome(DONE if name == "model" else REFUSED, probe.value)
    assert answer.status == 200, (api, name, answer.body)
    if name == "cache_salt":  # all prompts were asked before, without it
        return Outcome(DONE if cached(served.post(path, before)) > cached(answer) else IGNORED, probe.value)
    if name in ("cache_control", "prompt_cache_retention"):
        return Outcome(DONE if _is_retained(served, api, sent) else IGNORED, probe.value)
    if name == "store":
        is_kept = api == "responses" and served.get(f"{path}/{answer.json['id']}").status == 200
        return Outcome(IGNORED if api != "responses" or is_kept else DONE, probe.value)
    if name == "prompt_cache_key":
        return Outcome(DONE if probe.value in served.decisions(1)[0]["session"] else IGNORED, probe.value)
    plain = served.post(path, before)
    assert plain.status == 200, (api, name, plain.body)
    if shown(plain, api) != shown(answer, api):
        return Outcome(DONE, probe.value)
    return Outcome(TOLD if whole(plain) != whole(answer) else IGNORED, probe.value)


def _is_retained(served: RouterProcess, api: str, sent: dict[str, Any]) -> bool:
    """Send the request with a prompt of several blocks; tell whether the replica retains more of them than before."""
    [replica] = served.get("/replicas").json["replicas"]

    def retained() -> int:
        count: int = httpx2.get(f"{replica['url']}/load", trust_env=False).json()["pool"]["retained"]
        return count

    before = retained()
    # Of a few blocks: all APIs together must stay within a tenant's share.
    text = {"input": api * 8} if api == "responses" else {"messages": [{"role": "user", "content": api * 8}]}
    assert served.post(APIS[api].path, sent | text).status == 200
    try:
        wait_until(lambda: retained() > before, "blocks are retained")
    except AssertionError:
        return False
    return True


def _previous(served: RouterProcess) -> Probe:
    return Probe(served.post(APIS["responses"].path, BASES["responses"]).json["id"])


def shown(answer: Answer, api: str) -> Any:
    """The part of an answer that the model made."""
    if api == "responses" and answer.body.startswith(b"{"):
        return CACHED.sub(b"", CHANCE.sub(b"", msgspec.json.encode([answer.json.get(name) for name in OF_ANSWER])))
    return whole(answer)


def whole(answer: Answer) -> bytes:
    return CACHED.sub(b"", CHANCE.sub(b"", answer.body))


def cached(answer: Answer) -> int:
    [found] = CACHED.findall(answer.body)
    return int(found.rpartition(b":")[2])


# ---- kinds of items in lists


def outcomes_of_kinds(served: RouterProcess) -> dict[tuple[str, str], dict[str, list[str]]]:
    """By API and list, then by outcome: the names of kinds."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for (api, place), union in KINDS.items():
        of_place = found.setdefault((api, place), {})
        for name, example in kinds(resolved(union)):
            of_place.setdefault(outcome_of_kind(served, api, place, example), []).append(name)
    return found


def outcome_of_kind(served: RouterProcess, api: str, place: str, example: Any) -> str:
    path, base = APIS[api].path, _short(api)
    without = served.post(path, base)
    answers = [served.post(path, base | changed) for changed in with_item(api, place, example)]
    assert {answer.status for answer in answers} <= {200, 400}, [answer.body for answer in answers]
    taken = [answer for answer in answers if answer.status == 200]
    if not taken:
        return REFUSED
    return DONE if any(shown(one, api) != shown(without, api) for one in taken) else IGNORED


def _short(api: str) -> dict[str, Any]:
    """The base request with an answer of one token: the tokens of its prompt are all that is looked at."""
    return BASES[api] | {"max_output_tokens" if api == "responses" else "max_tokens": 1}


def with_item(api: str, place: str, item: Any) -> Iterator[dict[str, Any]]:
    """The base request with this item: in a message of either side, where it may belong to one of them only."""
    text = {"type": "input_text" if api == "responses" else "text", "text": "hi"}
    match place:
        case "tools[]":
            yield {"tools": [item]}
        case "input[]":
            yield {"input": [{"role": "user", "content": "hi"}, item]}
        case "input[].content[]":
            yield {"input": [{"role": "user", "content": [text, item]}]}
        case _:
            yield {"messages": [{"role": "user", "content": [text, item]}]}
            if api == "messages":
                asked = {"role": "user", "content": "hi"}
                yield {"messages": [asked, {"role": "assistant", "content": [item]}, asked]}


# ---- in front of another engine


async def outcomes_elsewhere() -> dict[str, list[str]]:
    """By outcome: the fields and kinds of items, each with its API."""
    found: dict[str, list[str]] = {}
    engine = Scripted("engine", says(b"{}"))
    async with routed(engine) as running, connect(running.port) as client:
        for api, label, body in _bodies():
            engine.calls.clear()
            answer = await client.post(APIS[api].path, body)
            passed_on = answer.status == 200 and [call.json for call in engine.calls] == [body]
            what = PASSED_ON if passed_on else REFUSED if answer.status == 400 else f"status {answer.status}"
            found.setdefault(what, []).append(f"{api} {label}")
    return found


def _bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for api, base in BASES.items():
        for name in fields(api):
            probe = probe_of(api, name)
            value = MODEL if name == "model" else probe.value
            yield api, name, base | {"model": MODEL} | probe.beside | {name: value}
    for (api, place), union in KINDS.items():
        for name, example in kinds(resolved(union)):
            for changed in with_item(api, place, example):
                yield api, f"{place} {name}", BASES[api] | {"model": MODEL} | changed
