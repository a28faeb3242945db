"""Fields of OpenAI's and vLLM's clients that have no effect here, and are refused by name.

A field is here twice, as a field and in the table; a test compares the two.
"""

from typing import Any

from msgspec import Struct

from api.errors import invalid, quoted

# Fields with an effect that we cannot give, and the values that ask for none of it (null always does).
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class Unsupported(Struct, kw_only=True):
    """The fields of `UNSUPPORTED`, decoded in order to be refused."""

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    priority: Any = None
    prompt_embeds: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tool_choice: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None

    def __post_init__(self) -> None:
        for name, neutral in UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and not any(type(value) is type(none) and value == none for none in neutral):
                accepted = " or ".join(map(quoted, neutral))
                fix = f"send {accepted}, or leave it out" if accepted else "leave it out"
                raise invalid(f"{name} is {quoted(value)}, which is not supported; {fix}", name, "unsupported")
