"""Clean traffic has no findings, and a planted fault is the only finding, with its cost."""

import random
import time
from collections.abc import Iterable

import pytest
from msgspec import Raw
from msgspec.structs import replace

from lab.analysis.breaks.prompts import Finding, read_prompts
from lab.analysis.breaks.search import search
from tests.lab.analysis.faults import (
    FAULTS,
    HISTORY,
    IDENTIFIER,
    SALT,
    TIMESTAMP,
    TOOL_CHANGE,
    TOOL_ORDER,
    chosen_tools,
    clock,
    identified,
    salted,
    shuffled_tools,
    stamped,
    uuid,
    windowed,
)
from tests.lab.analysis.logs import (
    CLEAN,
    SYSTEM,
    Body,
    agents,
    chatbot,
    conversations,
    logged,
    message,
    retrieval,
    with_system,
    words,
)


def findings(bodies: Iterable[Body], *, sessions: bool = False) -> list[Finding]:
    return search(read_prompts(logged(bodies, sessions=sessions)).prompts)


def names(bodies: Iterable[Body], *, sessions: bool = False) -> list[str]:
    return [finding.name for finding in findings(bodies, sessions=sessions)]


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("kind", CLEAN)
def test_no_finding_for_clean_traffic(kind: str, sessions: bool) -> None:
    assert names(CLEAN[kind](), sessions=sessions) == []


def test_no_finding_for_a_few_tenants() -> None:
    bodies = with_system(conversations(), lambda at, old: f"Tenant {'ABC'[at % 3]}. {old}")
    assert names(bodies) == []


def test_no_finding_for_a_salt_for_each_tenant() -> None:
    bodies = [body | {"cache_salt": f"tenant-{at % 5}"} for at, body in enumerate(chatbot())]
    assert names(bodies) == []


def test_no_finding_for_a_time_after_everything_that_is_the_same() -> None:
    assert names(with_system(chatbot(), lambda at, old: f"{old} Now: {clock(61 * at)}.")) == []


def test_no_finding_for_an_answer_that_is_asked_for_again_or_another_way() -> None:
    chance = random.Random("again")
    bodies = []
    for body in conversations():
        *history, _ = body["messages"]
        bodies += [body, body, {"messages": [*history, message("user", words(chance, 20))]}]
    assert names(bodies) == []


@pytest.mark.parametrize("plant", FAULTS)
def test_a_fault_is_named_among_clean_traffic(plant: str) -> None:
    name, make = FAULTS[plant]
    assert names([*chatbot(30), *conversations(10, 4), *make(), *retrieval(30)]) == [name]


def test_the_loss_is_what_would_have_been_shared() -> None:
    [found] = findings(stamped(chatbot(50), "Now: 2025-06-15T{time}Z."))
    assert found.requests == 50
    assert found.lost_tokens == pytest.approx(49 * len(SYSTEM) / 4, rel=0.03)


def test_the_example_shows_where_two_prompts_part() -> None:
    [found] = findings(stamped(chatbot(50), "The shop is open from nine to five, and now it is {time} there."))
    example = found.example
    assert example.before.endswith("and now it is 00:") or example.before.endswith("and now it is 0")
    assert len(example.before) == 40
    assert example.one != example.other
    assert example.one.endswith("You are") or " there. You" in example.one
    one, other = found.request_ids
    assert one != other
    assert "date" in found.advice


def test_two_faults_are_both_named_although_each_alone_costs_everything() -> None:
    bodies = identified(stamped(chatbot(), "Now: {time}."), uuid)
    assert set(names(bodies)) == {TIMESTAMP, IDENTIFIER}
    assert set(names(salted(shuffled_tools(agents())))) == {SALT, TOOL_ORDER}


def test_a_salt_is_not_shown_whole() -> None:
    bodies = salted(chatbot())
    [found] = findings(bodies)
    salts = {body["cache_salt"] for body in bodies}
    assert found.example.before == "cache_salt "
    assert found.example.one.endswith("...") and found.example.one not in salts


def test_a_changed_history_of_short_messages_is_named() -> None:
    bodies: list[Body] = []
    for talk in "abcdef":
        first, *kept, answer, last = (
            message(role, f"{talk}, {role} {at}") for at, role in enumerate(("user", "bot") * 3)
        )
        bodies += [{"messages": [first, *kept]}, {"messages": [message("user", talk), *kept, answer, last]}]
    assert HISTORY in names(bodies)


def test_a_session_distinguishes_equal_texts() -> None:
    """One message in common may be chance, unless the router knows that it is one conversation."""
    bodies = windowed(conversations(turns=8), 3)
    assert names(bodies, sessions=True) == [HISTORY]


def test_the_most_expensive_fault_comes_first() -> None:
    found = findings([*stamped(chatbot(80), "Now: {time}."), *chosen_tools(agents(6, 4))])
    assert [each.name for each in found] in ([TIMESTAMP, TOOL_CHANGE], [TOOL_CHANGE, TIMESTAMP])
    assert found[0].lost_tokens >= found[1].lost_tokens


def test_models_share_nothing_with_each_other() -> None:
    lines = [replace(line, model=f"model-{at}") for at, line in enumerate(logged(stamped(chatbot(), "Now: {time}.")))]
    assert search(read_prompts(lines).prompts) == []


def test_bodies_that_have_no_text_are_counted() -> None:
    [line] = logged(chatbot(1))
    odd = [b"[1]", b"null", b'"text"', b'{"prompt": [1, 2, 3]}', b'{"messages": 5}', b'{"messages": [7]}', b"{}"]
    read = read_prompts([line, *logged(chatbot(2), bare=True), *(replace(line, raw_body=Raw(body)) for body in odd)])
    assert (read.requests, read.without_body, read.without_text, len(read.prompts)) == (10, 2, 7, 1)


def test_every_form_of_content_is_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    body: Body = {
        "messages": [
            message("system", SYSTEM),
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42"},
        ]
    }
    [prompt] = read_prompts(logged([body])).prompts
    assert [piece.role for piece in prompt.pieces] == ["system", "user", "assistant", "tool"]
    assert [prompt.rest[0].text.startswith("Look\n"), '"name": "f"' in prompt.rest[1].text] == [True, True]


def test_several_prompts_of_one_request_are_read() -> None:
    read = read_prompts(logged([{"prompt": "ab"}]))
    assert [piece.text for prompt in read.prompts for piece in prompt.pieces] == ["ab"]
    [line] = logged([{"prompt": "ab"}])
    several = read_prompts([replace(line, raw_body=Raw(b'{"prompt": ["one", "two"]}'), prompt_tokens=10)])
    assert [(prompt.rest[0].text, prompt.tokens) for prompt in several.prompts] == [("one", 5), ("two", 5)]


@pytest.mark.chaos
def test_thousands_of_prompts_take_seconds() -> None:
    bodies = stamped(conversations(320, 8), "Now: {time}.")
    read = read_prompts(logged(bodies))
    started_s = time.process_time()  # others may compute, too
    assert [finding.name for finding in search(read.prompts)] == [TIMESTAMP]
    assert time.process_time() - started_s < 12


# ---- Claude Code's line


def billed(bodies: Iterable[Body]) -> list[Body]:
    """As Claude Code writes it: a short digest, in which no id is seen."""

    def line(at: int, system: str) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.1; cch={random.Random(at).getrandbits(20):05x};\n{system}"

    return with_system(bodies, line)


def test_a_billing_line_is_left_out_as_engines_do() -> None:
    assert findings(billed(chatbot())) == []
