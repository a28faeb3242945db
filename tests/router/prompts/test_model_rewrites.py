"""Models under other names: rules of files, and what bodies become."""

import json
from pathlib import Path

import pytest

from router.prompts.model_rewrites import NO_RULES, Rules, parse_rewrites, rewritten

ROOT = Path(__file__).resolve().parents[3]
ONE = Rules({"chat": "old"})
ALL = Rules({"chat": "old"}, "rest")


def model_of(rules: Rules, asked: str) -> str:
    body = json.dumps({"model": asked}).encode()
    model: str = json.loads(rewritten(rules, body) or body)["model"]
    return model


# ---- files


def test_a_file_names_targets_of_models_and_of_all_others() -> None:
    text = """
    [[rewrites]]
    model = "chat"
    target = "old"
    [[rewrites]]
    target = "rest"
    """
    rules = parse_rewrites("rules.toml", text)
    assert (rules.target("chat"), rules.target("anything")) == ("old", "rest")
    assert parse_rewrites("rules.toml", "") == NO_RULES and NO_RULES.is_empty and not rules.is_empty


def test_the_file_on_the_page_is_one() -> None:
    page = (ROOT / "docs" / "model-names.md").read_text()
    rules = parse_rewrites("rewrites.toml", page.split("```toml\n")[1].split("```")[0])
    assert rules.exact.keys() == {"gpt-4o"}
    assert rules.target("gpt-4o") == rules.target("anything") == "Qwen/Qwen3-8B"


TABLE = "[[rewrites]]\nmodel = 'a'\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rewrites = 1", r"f.toml: Expected `array`, got `int` - at `\$\.rewrites`"),
        ("[[rewrites", "f.toml is not TOML"),
        ("[[rewrite]]", "f.toml: Object contains unknown field `rewrite`"),
        (TABLE, r"missing required field `target` - at `\$\.rewrites\[0\]`"),
        (f"{TABLE}target = ''", r"Expected `str` of length >= 1 - at `\$\.rewrites\[0\]\.target`"),
        (f"{TABLE}targets = {{b = 1}}", "Object contains unknown field `targets`"),
        (f"{TABLE}target = 'b'\n{TABLE}target = 'c'", "the model 'a' is in two tables"),
        ("[[rewrites]]\ntarget = 'b'\n[[rewrites]]\ntarget = 'c'", "two tables without a model"),
    ],
)
def test_a_broken_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rewrites("f.toml", text)


# ---- bodies


def test_only_the_model_is_another_one() -> None:
    body = b'{"messages": [{"content": "\\u00fc \xc3\xbc"}], "model":"chat", "seed": 12345678901234567890, "x": 1.50}'
    found = rewritten(ONE, body)
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
    assert rewritten(ONE, body) is None
    assert rewritten(NO_RULES, body) is None


def test_a_name_is_read_as_engines_read_it() -> None:
    """Whatever its spelling, and the last one counts."""
    for body in (b'{"model":"c\\u0068at"}', b'{"model":"other","model":"chat"}', b'{"\\u006dodel":"chat"}'):
        assert rewritten(ONE, body) == bytearray(b'{"model":"old"}')
    assert rewritten(ONE, b'{"model":"chat","model":"other"}') is None


def test_a_rule_for_all_comes_after_those_for_one() -> None:
    assert [model_of(ALL, name) for name in ("chat", "old", "rest")] == ["old", "rest", "rest"]
