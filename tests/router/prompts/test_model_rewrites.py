"""Models under other names: rules of files, what bodies become, and that conversations stay where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompts.model_rewrites import NO_RULES, Rules, Target, chosen, parse_rewrites, rewritten

ROOT = Path(__file__).resolve().parents[3]
SPLIT = Rules({"chat": [Target("old", 90), Target("new", 10)]})
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
    assert found == b'{"messages":[{"content": "\\u00fc \xc3\xbc"}],"model":"old","seed":12345678901234567890,"x":1.50}'


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
        assert rewritten(ONE, body, no_session) == b'{"model":"old"}'
    assert rewritten(ONE, b'{"model":"chat","model":"other"}', no_session) is None


def test_a_rule_for_all_comes_after_those_for_one() -> None:
    assert [model_of(ALL, {"model": name}) for name in ("chat", "old", "rest")] == ["old", "rest", "rest"]


# ---- shares


def conversation(number: int) -> dict[str, Any]:
    return {
        "model": "chat",
        "messages": [{"role": "system", "content": "Be brief."}, {"content": f"Question {number}"}],
    }


def test_conversations_are_shared_out_by_weights() -> None:
    models = [model_of(SPLIT, conversation(number)) for number in range(2000)]
    assert 130 < models.count("new") < 270


def test_a_conversation_stays_while_it_grows() -> None:
    for number in range(50):
        body = conversation(number)
        first = model_of(SPLIT, body)
        body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
        assert model_of(SPLIT, body) == first


def test_a_growing_prompt_stays_from_its_first_kilobyte_on() -> None:
    for number in range(50):
        prompt = f"{number} " + "Once upon a time, " * 60
        assert model_of(SPLIT, {"model": "chat", "prompt": prompt}) == model_of(
            SPLIT, {"model": "chat", "prompt": prompt + "there was"}
        )


def test_a_session_decides_whatever_is_said() -> None:
    for session in map(str, range(50)):
        models = {model_of(SPLIT, conversation(number), session) for number in range(5)}
        keyed = {model_of(SPLIT, conversation(number) | {"prompt_cache_key": session}) for number in range(5)}
        assert models == keyed and len(models) == 1


def test_a_response_is_continued_by_the_model_that_gave_it() -> None:
    for number in range(20):
        body = json.dumps({"model": "chat", "input": f"Go on {number}", "previous_response_id": "r"}).encode()
        found = rewritten(SPLIT, body, no_session, lambda response: ["new"] if response == "r" else [])
        assert found is not None and json.loads(found)["model"] == "new"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.binary(max_size=40))
def test_some_target_is_chosen_and_always_the_same(weights: list[int], said: bytes) -> None:
    targets = [Target(str(number), weight) for number, weight in enumerate(weights)]
    found = chosen("m", targets, said)
    assert found in {target.model for target in targets}
    assert chosen("m", targets, said) == found


@given(st.integers(1, 99), st.integers(1, 99), st.binary(max_size=20))
def test_a_larger_share_only_takes_conversations_from_others(before: int, more: int, said: bytes) -> None:
    def share(percent: int) -> str:
        return chosen("m", [Target("new", percent), Target("old", 100 - percent)], said) if percent < 100 else "new"

    if share(before) == "new":
        assert share(min(100, before + more)) == "new"
