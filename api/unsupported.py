"""Fields of OpenAI's and vLLM's clients that have no effect here, and are refused by name."""

from typing import TYPE_CHECKING, Any

from msgspec import Struct, defstruct

from api.errors import invalid, quoted

# Fields with an effect that we cannot give, and the values that ask for none of it (null always does).
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


if TYPE_CHECKING:
    _Fields = Struct
else:
    _Fields = defstruct("_Fields", [(name, Any, None) for name in UNSUPPORTED], kw_only=True)


class Unsupported(_Fields, kw_only=True):
    """The fields of `UNSUPPORTED`, decoded in order to be refused."""

    def __post_init__(self) -> None:
        for name, neutral in UNSUPPORTED.items():
            check_neutral(name, getattr(self, name), neutral)


def check_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """Raise ApiError 400 unless the value asks for nothing."""
    if value is not None and not any(type(value) is type(none) and value == none for none in neutral):
        accepted = " or ".join(map(quoted, neutral))
        fix = f"send {accepted}, or leave it out" if accepted else "leave it out"
        raise invalid(f"{name} is {quoted(value)}, which is not supported; {fix}", name, "unsupported")
