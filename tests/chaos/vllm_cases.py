"""Cases of vLLM's own tests of its responses and messages: requests, and parts of the answers, in our words.

docs/qualification.md names the tests, and those that are left out. Each line of the table is asked for a whole answer
and for a stream by the official client; `holds` has parts of the answer, where * stands for anything that is not empty.
"""

import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from pydantic import BaseModel

CHAT = "What is the weather in Berlin?"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "The weather of a city"}
SYSTEM: Any = {"type": "text", "text": "You are a helpful assistant."}
BILLING: Any = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli;"}


class Clients(NamedTuple):
    model: str
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    def ask(self, asked: Any = "Hello!", **fields: Any) -> Any:
        return self.openai.responses.create(model=self.model, input=asked, **fields)

    def form(self, said: str = "Hello!", **fields: Any) -> Any:
        return {"model": self.model, "max_tokens": 256, "messages": [{"role": "user", "content": said}]} | fields

    def message(self, said: str = "Hello!", **fields: Any) -> Any:
        return self.anthropic.messages.create(**self.form(said, **fields))


@contextmanager
def clients_of(url: str, model: str) -> Iterator[Clients]:
    how: Any = {"api_key": "none", "max_retries": 0}
    with openai.OpenAI(base_url=f"{url}/v1", **how) as ours, anthropic.Anthropic(base_url=url, **how) as theirs:
        yield Clients(model, ours, theirs)


def check(answer: BaseModel, holds: Mapping[str, Any]) -> None:
    for path, wanted in holds.items():
        part: Any = answer.model_dump()
        for name in path.split("."):
            part = part[int(name)] if isinstance(part, list) else part[name]
        assert part if wanted == "*" else part == wanted, (path, part)


def judge_response(clients: Clients, asked: Any, holds: Mapping[str, Any]) -> None:
    whole = clients.openai.responses.create(model=clients.model, **asked)
    streamed = check_events(list(clients.openai.responses.create(model=clients.model, stream=True, **asked)))
    for answer in (whole, streamed):
        check(answer, {"output": "*", "usage.output_tokens": "*", **holds})
        usage, is_cut_off = answer.usage, answer.incomplete_details is not None
        assert answer.status == ("incomplete" if is_cut_off else "completed")
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > usage.input_tokens > 0
    assert {item.type for item in whole.output} == {item.type for item in streamed.output}


OPENED_BY = {"response.completed": "response.created", "response.incomplete": "response.created"}
for begun, parts in (
    ("added", ("output_item", "content_part", "reasoning_part")),
    ("delta", ("output_text", "reasoning_text", "function_call_arguments")),
):
    OPENED_BY |= {f"response.{part}.done": f"response.{part}.{begun}" for part in parts}


def check_events(events: Sequence[Any]) -> Any:
    """Return the last event's response; what is opened is closed, and each event names the item that it belongs to."""
    opened: list[str] = []
    texts: dict[str, str] = {}
    item = None
    for event in events:
        if event.type in OPENED_BY:
            assert opened.pop() == OPENED_BY[event.type], event
        elif event.type in OPENED_BY.values() and opened[-1:] != [event.type]:
            opened.append(event.type)
        if event.type == "response.output_item.added":
            item = event.item.id, event.output_index
        elif event.type == "response.output_item.done":
            assert (event.item.id, event.output_index) == item
        elif hasattr(event, "item_id"):
            assert (event.item_id, event.output_index) == item
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif event.type.endswith("arguments.done"):
            assert event.arguments == texts.get(event.item_id, "")
        elif hasattr(event, "response") and event is not events[-1]:
            assert event.response.usage is None
    assert not opened and events[0].type == "response.created"
    final = events[-1].response
    assert "".join(texts.get(one.id, "") for one in final.output if one.type == "message") == final.output_text
    return final


def judge_message(clients: Clients, asked: Any, holds: Mapping[str, Any]) -> None:
    whole = clients.message(**asked)
    with clients.anthropic.messages.stream(**clients.form(**asked)) as stream:
        events: list[Any] = list(stream)
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        check(answer, {"role": "assistant", "usage.input_tokens": "*", "usage.output_tokens": "*", **holds})
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    check(events[0].message, {"type": "message", "role": "assistant", "usage.output_tokens": 0})
    [end] = [event for event in events if event.type == "message_delta"]
    assert "stop_sequence" in end.delta.model_fields_set and end.usage.output_tokens > 0


def refuse(clients: Clients, api: str, asked: Any) -> None:
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
        clients.ask(asked.pop("input"), **asked) if api == "responses" else clients.message(**asked)


# ---- cases of more than one request


def keeps_responses(clients: Clients) -> None:
    kept, passing = clients.ask(), clients.ask(store=False)
    assert clients.openai.responses.retrieve(kept.id).output_text == kept.output_text
    with pytest.raises(openai.NotFoundError):
        clients.openai.responses.retrieve(passing.id)


def cancels_no_whole_response(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        clients.openai.responses.cancel(clients.ask().id)


def goes_on(clients: Clients) -> None:
    first = clients.ask("Hello, my name is John.", instructions="Be kind.")
    one, other = (clients.ask("My name is Mark.", previous_response_id=first.id) for _ in range(2))
    last = clients.ask("What is my name?", previous_response_id=one.id)
    assert one.previous_response_id == first.id and one.usage.input_tokens == other.usage.input_tokens
    assert first.usage.input_tokens < one.usage.input_tokens < last.usage.input_tokens


def takes_a_result(clients: Clients) -> None:
    named = {"type": "function", "name": TOOL["name"]}
    answer = clients.ask(CHAT, tools=[{**TOOL, "type": "function", "parameters": SCHEMA}], tool_choice=named)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == TOOL["name"] and isinstance(json.loads(call.arguments)["city"], str)
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"}
    assert clients.ask([{"role": "user", "content": CHAT}, call, told]).output_text


def takes_its_own_words(clients: Clients) -> None:
    words = clients.ask("Remember MARKER-729.").output_text
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]}
    assert clients.ask([said, {"type": "reasoning", "summary": []}, {"role": "user", "content": "Which?"}]).output_text


def parses(clients: Clients) -> None:
    class Event(BaseModel):
        participants: list[str]

    answer = clients.openai.responses.parse(model=clients.model, input="A science fair on Friday", text_format=Event)
    assert isinstance(answer.output_parsed, Event)


def tells_of_the_cache(clients: Clients) -> None:
    asked = clients.form(f"What is the capital of {time.time_ns()}, and of {time.time_ns()}?", system=[SYSTEM])
    before, after = (clients.anthropic.messages.create(**asked).usage for _ in range(2))
    with clients.anthropic.messages.stream(**asked) as stream:
        usage = stream.get_final_message().usage
    assert before.cache_read_input_tokens < after.cache_read_input_tokens == usage.cache_read_input_tokens


def counts_no_billing_line(clients: Clients) -> None:  # Claude Code's own bookkeeping
    asked: Any = {"model": clients.model, "messages": [{"role": "user", "content": "Hello"}]}
    count = clients.anthropic.messages.count_tokens
    assert count(**asked, system=[BILLING, SYSTEM]) == count(**asked, system=[SYSTEM])


def names_messages(clients: Clients) -> None:
    ids = [clients.message(max_tokens=1).id for _ in range(3)]
    assert len({*ids}) == 3 and all(one.startswith("msg_") for one in ids)
    answer = clients.message(CHAT, tools=[{**TOOL, "input_schema": SCHEMA}], tool_choice={"type": "any"})
    calls = [block.id for block in answer.content if block.type == "tool_use"]
    assert calls and all(one.startswith("toolu_") for one in calls)


CASES: dict[str, Callable[[Clients], None]] = {
    judge.__name__: judge
    for judge in (
        *(keeps_responses, cancels_no_whole_response, goes_on, takes_a_result, takes_its_own_words, parses),
        *(tells_of_the_cache, counts_no_billing_line, names_messages),
    )
}
SCRIPTED = {"takes_a_result", "parses"}  # a model has to say what these want, or at least to come to an end
for row in map(json.loads, Path(__file__).with_suffix(".jsonl").read_text().splitlines()):
    name, api, asked = f"{row['api']}: {row['name']}", row["api"], row["asked"]
    if row.get("refused"):
        CASES[f"refused {name}"] = partial(refuse, api=api, asked=asked)
    else:
        judged = judge_response if api == "responses" else judge_message
        CASES[name] = partial(judged, asked=asked, holds=row.get("holds", {}))
    if row.get("scripted"):
        SCRIPTED.add(name)


def cases(names: Iterable[str], failing: Container[str]) -> list[Any]:
    """The parameters of a test; those that fail must."""
    return [pytest.param(name, marks=[pytest.mark.xfail(strict=True)] * (name in failing)) for name in names]
