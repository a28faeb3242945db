"""Tells which requests another replica could continue, by their fields; and adds and removes those of token ids."""

import re
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from engines import PROFILES
from router.prompts.prompt import Prompt

# Fields that depend on the whole output, or show the prompt, with their neutral values. None is always neutral.
WHOLE_OUTPUT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),  # 0 is not the default: it asks for a token's own
    "prompt_logprobs": (),
    "stop": ([],),
    "stop_regex": ([],),
    "bad_words": ([],),  # a word may have begun before
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    # Plugins of the engine, its sessions and its watermarks may look at more than is known here.
    **{name: ({},) for engine in PROFILES.values() for name in engine.plugin_fields},
    "custom_params": ({},),
    "custom_logit_processor": (),
    "session_params": ({},),
    "watermarking": (False,),
    "watermark": ({},),
    "repetition_detection": (),
    # Parameters to fetch a prompt's KV hold for one prompt, once.
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
_STRUCTURED = "structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf"
WHOLE_OUTPUT |= dict.fromkeys(_STRUCTURED.split(), ())
# Fields that have an answer tell more than its text.
_TOLD = """return_hidden_states return_routed_experts return_cached_tokens_details return_spec_tokens_details
    return_meta_info return_prompt_token_ids return_input_ids_in_sglext return_output_ids_in_sglext return_prompt_text
    return_sampling_mask return_flat_raw_output_top_logprobs return_token_offsets return_weight_versions
    return_mm_kwargs return_flat_raw_top_logprobs_b64"""
WHOLE_OUTPUT |= dict.fromkeys(_TOLD.split(), (False,)) | {"logprob_token_ids": ([],), "sampling_logprobs_mode": ()}
_WholeOutput = msgspec.defstruct("_WholeOutput", [(name, Any, None) for name in WHOLE_OUTPUT])
_decode_whole_output = msgspec.json.Decoder(_WholeOutput).decode


def not_resumable(body: bytes) -> str | None:
    """The first field that keeps an engine from simply continuing a prompt with half its answer, if there is one."""
    asked = _decode_whole_output(body)
    for name, neutral in WHOLE_OUTPUT.items():
        value = getattr(asked, name)
        if value is None:
            continue
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return name
    return None


class Asked(Struct):
    """Other fields of a request that decide whether, and how, its answer can be continued."""

    max_tokens: int | UnsetType | None = UNSET  # null is another default in a completion
    max_completion_tokens: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stream_options: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    # Each of these makes the prompt differ from its tokens.
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    input_ids: Any = None


OTHER_PROMPT = ("truncate_prompt_tokens", "prompt_embeds", "input_ids")
decode_asked = msgspec.json.Decoder(Asked).decode


def why_alone(prompt: Prompt, body: bytes) -> str | None:
    """The reason why no other replica could continue the answer; None if one could."""
    if not prompt.exact:
        return f"its prompt is known only approximately ({prompt.why_not})"
    field = not_resumable(body) or ("n" if prompt.choices != 1 else "a picture" if prompt.pictures else None)
    if field is None:
        try:
            asked = decode_asked(body)
        except msgspec.ValidationError as error:
            return str(error)
        field = next((name for name in OTHER_PROMPT if getattr(asked, name) is not None), None)
    return None if field is None else f"{field} looks at the whole of it"


# ---- what is added to a request, and removed from events


# Within a string the quotes would stand behind backslashes, so a member's name cannot be mistaken.
_IDS = b'token_ids"'
_MEMBER = re.compile(rb'"(?:prompt_)?token_ids"\s*:\s*\[[0-9,\s]*\]\s*(,?)')
_BEFORE = len('"prompt_')
MAX_ADDED = 256  # members of an event that are removed: an engine adds three, and two for each further choice
MAX_SPACE = 64  # before a comma, where no engine writes any
# Fields of chat requests only, or set anew. All others mean the same in a completion.
NOT_CONTINUED = frozenset(
    """messages prompt max_tokens max_completion_tokens return_token_ids tools tool_choice parallel_tool_calls
    response_format logprobs top_logprobs chat_template chat_template_kwargs add_generation_prompt
    continue_final_message add_special_tokens reasoning_effort include_reasoning documents mm_processor_kwargs
    suffix echo best_of prompt_token_ids""".split()  # noqa: SIM905
)


def with_ids(body: bytes) -> bytes:
    """The body, with a request for token ids at its end: parsers take the last of two fields."""
    return body.rstrip()[:-1] + b',"return_token_ids":true}'


def without_ids(event: bytes) -> bytes:
    """The event without the members that were asked for; it is searched once, whatever a replica has written."""
    kept: list[bytes] = []
    start = name = 0
    for _ in range(MAX_ADDED):
        if (name := event.find(_IDS, name)) < 0:
            break
        begin, name = event.rfind(b'"', max(start, name - _BEFORE), name), name + len(_IDS)
        found = _MEMBER.match(event, begin) if begin >= 0 else None
        if found is None:
            continue
        end, before = found.end(), event.rfind(b",", max(start, begin - MAX_SPACE), begin)
        if before >= 0 and not event[before + 1 : begin].strip():
            begin, end = before, end - len(found[1])  # the comma before it goes, or the one behind the first member
        kept.append(event[start:begin])
        start = name = end
    return b"".join((*kept, event[start:])) if kept else event
