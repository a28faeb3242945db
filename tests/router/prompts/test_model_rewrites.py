"""Models under other names: rules of files, what bodies become, and that conversations stay where they are."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompts.model_rewrites import NO_RULES, Rules, Target, chosen, parse_rewrites, rewritten

ROOT = Path(__file__).resolve().parents[3]
SPLIT = Rules({"chat": [Target("old", 90), Target("new", 10)]})
EVEN = Rules({"chat": [Target("old", 1), Target("new", 1)]})
ONE = Rules({"chat": [Target("old", 1)]})
ALL = Rules({"chat": [Target("old", 1)]}, [Target("rest", 1)])


def no_session(key: str | None) -> str | None:
    return key


def model_of(rules: Rules, body: Any, session: str | None = None) -> str:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = rewritten(rules, raw, lambda key: session or key)
    model: str = json.loads(raw if found is None else found)["model"]
    return model


# ---- files


def test_a_file_names_targets_of_models_and_of_all_others() -> None:
    text = """
    [[rewrites]]
    model = "chat"
    targets = {old = 90, new = 10}
    [[rewrites]]
    targets = {rest = 1}
    """
    rules = parse_rewrites("rules.toml", text)
    assert rules.targets("chat") == [Target("old", 90), Target("new", 10)]
    assert rules.targets("anything") == [Target("rest", 1)]
    assert parse_rewrites("rules.toml", "") == NO_RULES and NO_RULES.is_empty and not rules.is_empty


def test_the_file_on_the_page_is_one() -> None:
    page = (ROOT / "docs" / "model-names.md").read_text()
    rules = parse_rewrites("rewrites.toml", page.split("```toml\n")[1].split("```")[0])
    assert rules.targets("support") == [Target("support-v1", 90), Target("support-v2", 10)]
    assert rules.targets("gpt-4o") == rules.targets("anything") == [Target("Qwen/Qwen3-8B", 1)]


TABLE = "[[rewrites]]\nmodel = 'a'\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rewrites = 1", r"f.toml: Expected `array`, got `int` - at `\$\.rewrites`"),
        ("[[rewrites", "f.toml is not TOML"),
        ("[[rewrite]]", "f.toml: Object contains unknown field `rewrite`"),
        (TABLE, r"missing required field `targets` - at `\$\.rewrites\[0\]`"),
        (f"{TABLE}targets = {{}}", r"Expected `object` of length >= 1 - at `\$\.rewrites\[0\]\.targets`"),
        (f"{TABLE}targets = {{b = 0}}", r"Expected `int` >= 1 - at `\$\.rewrites\[0\]\.targets\[\.\.\.\]`"),
        (f"{TABLE}targets = {{b = 1}}\n{TABLE}targets = {{c = 1}}", "the model 'a' is in two tables"),
        ("[[rewrites]]\ntargets = {b = 1}\n[[rewrites]]\ntargets = {c = 1}", "two tables without a model"),
    ],
)
def test_a_broken_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rewrites("f.toml", text)


# ---- bodies


def test_only_the_model_is_another_one() -> None:
    body = b'{"messages": [{"content": "\\u00fc \xc3\xbc"}], "model":"chat", "seed": 12345678901234567890, "x": 1.50}'
    found = rewritten(ONE, body, no_session)
    assert (
        found is not None
        and bytes(found)
        == b'{"messages":[{"content": "\\u00fc \xc3\xbc"}],"model":"old","seed":12345678901234567890,"x":1.50}'
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"model": 5}', b'{"model": null}', b'{"model": "other"}', b"\xff", b'{"prompt": "chat"}'],
)
def test_bodies_without_such_a_model_stay_as_they_are(body: bytes) -> None:
    assert rewritten(ONE, body, no_session) is None
    assert rewritten(NO_RULES, body, no_session) is None


def test_a_name_is_read_as_engines_read_it() -> None:
    """Whatever its spelling, and the last one counts."""
    for body in (b'{"model":"c\\u0068at"}', b'{"model":"other","model":"chat"}', b'{"\\u006dodel":"chat"}'):
        assert rewritten(ONE, body, no_session) == bytearray(b'{"model":"old"}')
    assert rewritten(ONE, b'{"model":"chat","model":"other"}', no_session) is None


def test_a_rule_for_all_comes_after_those_for_one() -> None:
    assert [model_of(ALL, {"model": name}) for name in ("chat", "old", "rest")] == ["old", "rest", "rest"]


# ---- shares


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(number: int, *before: dict[str, Any]) -> dict[str, Any]:
    return {"model": "chat", "messages": [*before, user(f"Question {number}")]}


SYSTEM = {"role": "system", "content": "Be brief."}
LONG = {"role": "system", "content": [{"type": "text", "text": "Be \\ \u00fc brief. " * 2000}]}


def test_conversations_are_shared_out_by_weights() -> None:
    for before in ((), (SYSTEM,)):
        models = [model_of(SPLIT, conversation(number, *before)) for number in range(2000)]
        assert 130 < models.count("new") < 270


@pytest.mark.parametrize("before", [(), (SYSTEM,), (LONG,), (SYSTEM, {"role": "developer", "content": None})], ids=str)
def test_a_conversation_stays_while_it_grows(before: tuple[dict[str, Any], ...]) -> None:
    for number in range(60):
        body = conversation(number, *before)
        first = model_of(EVEN, body)
        for _ in range(2):
            body["messages"] += [{"role": "assistant", "content": "Yes."}, user("Why?")]
            assert model_of(EVEN, body) == first
        assert model_of(EVEN, json.dumps(body, indent=2).encode()) == first


def test_a_response_is_the_same_conversation_when_its_text_becomes_a_list() -> None:
    for number in range(60):
        said = f"Question {number} \u00fc \\ " + "and so on " * (number * 20)
        first = model_of(EVEN, {"model": "chat", "input": said})
        parts = user([{"type": "input_text", "text": said}])
        later = {"model": "chat", "input": [parts, {"role": "assistant", "content": "Yes."}, user("Why?")]}
        assert model_of(EVEN, later) == first
        assert model_of(EVEN, {"model": "chat", "input": [user(said), user("Why?")]}) == model_of(EVEN, later)


def test_a_growing_prompt_stays_from_its_first_kilobyte_on() -> None:
    for number in range(60):
        prompt = f"{number} " + 'Once upon a "time", ' * 60
        assert model_of(EVEN, {"model": "chat", "prompt": prompt}) == model_of(
            EVEN, {"model": "chat", "prompt": prompt + "there was" * 9000}
        )


def test_a_session_decides_whatever_is_said() -> None:
    for session in map(str, range(50)):
        models = {model_of(SPLIT, conversation(number), session) for number in range(5)}
        keyed = {model_of(SPLIT, conversation(number) | {"prompt_cache_key": session}) for number in range(5)}
        assert models == keyed and len(models) == 1


def test_a_response_is_continued_by_the_model_that_gave_it() -> None:
    for number in range(20):
        body = json.dumps({"model": "chat", "input": f"Go on {number}", "previous_response_id": "r"}).encode()
        found = rewritten(SPLIT, body, no_session, lambda response: "new" if response == "r" else None)
        assert found is not None and json.loads(found)["model"] == "new"
        gone = rewritten(SPLIT, body, no_session, lambda _: "another that is no target any more")
        assert gone is not None and json.loads(gone)["model"] in ("old", "new")


@pytest.mark.parametrize(
    "said", ["[", "[[[[", '["', "[1, 2, 3]", '[{"role": 5}]', "[" * 10_000, '"\\ud83d\\ude00"', "7", "{}"]
)
def test_whatever_is_there_makes_some_choice(said: str) -> None:
    body = b'{"model":"chat","prompt":%b}' % said.encode()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        assert rewritten(EVEN, body, no_session) is None
    else:
        assert model_of(EVEN, body) in ("old", "new")


weights = st.lists(st.integers(1, 1000), min_size=1, max_size=6)


@given(weights, st.text(max_size=40))
def test_some_target_is_chosen_and_always_the_same(weights: list[int], said: str) -> None:
    targets = [Target(str(number), weight) for number, weight in enumerate(weights)]
    found = chosen("m", targets, said)
    assert found in {target.model for target in targets}
    assert chosen("m", targets[::-1], said) == found


@given(weights, weights, st.text(max_size=20))
def test_only_who_gains_gets_conversations_and_only_who_loses_gives_them(
    before: list[int], after: list[int], said: str
) -> None:
    first, then = ({str(number): weight for number, weight in enumerate(some)} for some in (before, after))
    old, new = (chosen("m", [Target(*one) for one in some.items()], said) for some in (first, then))
    if old != new:
        shares = [{name: weight / sum(some.values()) for name, weight in some.items()} for some in (first, then)]
        gains = then.get(new, 0) / first[new] if new in first else math.inf
        keeps = then.get(old, 0) / first[old]
        assert gains > keeps or math.isclose(gains, keeps), shares
