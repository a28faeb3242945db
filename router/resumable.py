"""Whether an engine that is sent a prompt and half its answer as one prompt would just go on with the answer."""

from typing import Any

import msgspec
from msgspec import Struct


class _Asked(Struct):
    """The fields that look at the whole output, or that show the prompt. Each but these may stand as it is."""

    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    echo: Any = None
    suffix: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    stop: Any = None
    min_tokens: Any = None
    thinking_token_budget: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    tools: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),  # not 0, which asks for a token's own
    "stop": (None, []),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
}
_decode = msgspec.json.Decoder(_Asked).decode


def not_resumable(body: bytes) -> str | None:
    """The first field for which it would not."""
    asked = _decode(body)
    for name in _Asked.__struct_fields__:
        value = getattr(asked, name)
        neutral = _NEUTRAL.get(name, (None,))
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return name
    return None
