"""Requests whose answer another replica could continue."""

from typing import Any

import msgspec
from msgspec import Struct

from router.prompts.prompt import Prompt

# Fields that depend on the whole output, or show the prompt, with their neutral values. None is always neutral.
_WHOLE_OUTPUT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),  # not 0, which asks for a token's own
    "prompt_logprobs": (),
    "stop": ([],),
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
_STRUCTURED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_WHOLE_OUTPUT |= dict.fromkeys(_STRUCTURED, ())
_WholeOutput = msgspec.defstruct("_WholeOutput", [(name, Any, None) for name in _WHOLE_OUTPUT])
_decode_whole_output = msgspec.json.Decoder(_WholeOutput).decode


def not_resumable(body: bytes) -> str | None:
    """The first field that keeps an engine from simply continuing a prompt with half its answer, if there is one."""
    asked = _decode_whole_output(body)
    for name, neutral in _WHOLE_OUTPUT.items():
        value = getattr(asked, name)
        if value is None:
            continue
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return name
    return None


class Asked(Struct):
    """Other fields of a request that decide whether, and how, its answer can be continued."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stream_options: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    # Each of these makes the prompt differ from its tokens.
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None


decode_asked = msgspec.json.Decoder(Asked).decode


def why_alone(prompt: Prompt, body: bytes) -> str | None:
    """The reason why no other replica could continue the answer; None if one could."""
    if not prompt.exact:
        return f"its prompt is known only approximately ({prompt.why_not})"
    field = not_resumable(body) or ("n" if prompt.choices != 1 else None)
    if field is None:
        try:
            asked = decode_asked(body)
        except msgspec.ValidationError as error:
            return str(error)
        names = ("truncate_prompt_tokens", "prompt_embeds")
        field = next((name for name in names if getattr(asked, name) is not None), None)
    return None if field is None else f"{field} looks at the whole of it"


def with_ids(body: bytes) -> bytes:
    """The body, with a request for token ids at its end: parsers take the last of two fields."""
    return body.rstrip()[:-1] + b',"return_token_ids":true}'
