import json
from typing import Any

import pytest

from router.proxy.resumable_request import not_resumable


def asked(**fields: Any) -> str | None:
    return not_resumable(json.dumps({"model": "m", "prompt": "x"} | fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True, "temperature": 0, "top_p": 0.5, "seed": 1, "max_tokens": 9, "user": "u"},
        {"n": 1, "echo": False, "stop": [], "suffix": None, "logprobs": False, "repetition_penalty": 1.0, "tools": []},
        {"response_format": {"type": "text"}, "guided_json": None, "min_tokens": 0, "presence_penalty": 0.0},
    ],
)
def test_a_plain_request_can_be_resumed(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("use_beam_search", True),
        ("echo", True),
        ("suffix", "s"),
        ("logprobs", 0),
        ("logprobs", True),
        ("prompt_logprobs", 0),
        ("stop", "a"),
        ("stop", ["a"]),
        ("min_tokens", 3),
        ("thinking_token_budget", 9),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("tools", [{}]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "a"),
    ],
)
def test_what_depends_on_the_whole_output_is_named(name: str, value: Any) -> None:
    assert asked(**{name: value}) == name
