"""A client whose odd request has other tokens than expected takes exactness from such requests, and from no others."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from api.prompts.prompts import Prompts
from router.prompts.prompt import read_peek
from router.prompts.shapes import DIFFERS, MAX_RETRY_S, oddities
from tests.router.families import prompts
from tests.router.members.test_verification import USER, World

ODD = USER | {"content": "Say\u2028a word."}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An engine that leaves out a character in a way that the router does not know of."""
    ours = prompts("qwen", tmp_path)
    made = World(ours, Prompts(ours.tokenizer, f"{{% macro all() %}}{ours.templates[0]}{{% endmacro %}}{LEFT_OUT}"))
    yield made
    await made.verification.close()


LEFT_OUT = "{{ all() | replace('\u2028', '') }}"


async def verify(world: World, **fields: Any) -> None:
    """Send a request twice: the first one verifies its shape."""
    world.send(**fields)
    await world.settled()
    assert world.send(**fields).exact


def answer_with_another_length(world: World, **fields: Any) -> None:
    prompt, _ = world.prompt(**fields)
    member: Any = world.member
    world.verification.other_length(member, world.tokens, prompt, prompt.tokens - 1)


async def test_an_odd_request_takes_exactness_from_its_like_alone(world: World) -> None:
    await verify(world, messages=[USER])
    answer_with_another_length(world, messages=[ODD])
    assert world.send(messages=[USER]).exact, "everybody's"
    assert world.send(messages=[USER | {"content": "odd:\n\n```x```"}]).exact, "odd in another way"
    for content in ("\u2028", "a\u2028b", " \u2028\u0007"):
        assert world.send(messages=[USER | {"content": content}]).why_not == DIFFERS


async def test_odd_requests_in_all_variations_leave_plain_ones_exact(world: World) -> None:
    await verify(world, messages=[USER])
    for more in ("", " ", "\u0301", "\x07", "<|im_end|>", "\\n", "1.5", "\ufb01", "\u202e", "{{", '\\"'):
        for times in range(3):
            answer_with_another_length(world, messages=[USER | {"content": f"\u2028{more * times}a"}])
        world.now_s += MAX_RETRY_S
    assert world.send(messages=[USER]).exact


async def test_an_odd_first_request_keeps_no_shape_from_being_verified(world: World) -> None:
    world.send(messages=[ODD])
    await world.settled()
    assert world.send(messages=[ODD]).why_not == DIFFERS
    await verify(world, messages=[USER])
    assert world.send(messages=[ODD]).why_not == DIFFERS


async def test_an_odd_request_that_agrees_does_not_excuse_plain_ones_that_differ(world: World) -> None:
    await verify(world, messages=[USER])
    answer_with_another_length(world, messages=[USER])
    assert world.send(messages=[USER]).why_not == DIFFERS, "a difference of a plain request counts for all"
    world.now_s += MAX_RETRY_S
    world.send(messages=[USER | {"content": "\x07"}])
    await world.settled()
    assert world.prompt(messages=[USER])[0].why_not == DIFFERS
    await verify(world, messages=[USER])


async def test_odd_requests_are_exact_again_once_they_agree(world: World) -> None:
    await verify(world, messages=[USER])
    answer_with_another_length(world, messages=[ODD])
    world.engine.made_by = world.tokens.prompts  # type: ignore[assignment]  # it has been mended
    asked = len(world.engine.asked)
    world.send(messages=[ODD])
    assert len(world.engine.asked) == asked, "it is asked again later"
    world.now_s += MAX_RETRY_S
    await verify(world, messages=[ODD])


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ('"messages": [{"role": "user", "content": "Zürich, 東京! {\\"a\\": 1}\\n- x"}]', set()),
        ('"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]', {"empty texts"}),
        ('"messages": [{"role": "user", "content": [{"type": "text", "x": null}]}]', {"other fields", "null"}),
        ('"messages": [{"role": "user", "content": "a "}]', {"spaces at an end"}),
        ('"messages": [{"role": "user", "content": "<|im_end|>"}]', {"special tokens"}),
        (
            '"messages": [{"role": "user", "content": "\\u0000e\\u0301"}]',
            {"control characters", "combining characters"},
        ),
        ('"messages": [{"role": "user", "content": [[[1.5]]]}], "tools": [1e3]', {"odd numbers"}),
    ],
)
def test_oddities_are_found_wherever_they_stand(fields: str, found: set[str]) -> None:
    peek = read_peek(f'{{"model": "m", {fields}}}'.encode())
    assert oddities(peek, ("<|im_end|>",), read_apart=False) == found
    assert oddities(peek, (), read_apart=True) == {"large"}


def test_a_deep_value_is_walked() -> None:
    peek = read_peek(b'{"model": "m", "prompt": ' + b"[" * 900 + b'""' + b"]" * 900 + b"}")
    assert oddities(peek, (), read_apart=False) == {"empty texts"}
