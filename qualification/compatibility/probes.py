"""A value for each field, beside what it has an effect, so that an answer with it differs from one without it."""

from typing import Any

from msgspec import Struct

from qualification.compatibility.sdk import hints, minimal

# A token in five ends an answer of the replica, unless it is told otherwise; forms are made of the others.
ENDING = tuple(range(192, 256))
LETTER = ord("b")
LETTERS = {"logit_bias": {str(LETTER): 100}}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
SCHEMA = {"type": "object", "properties": {"a": {"const": "bbbb"}}, "required": ["a"], "additionalProperties": False}
LIMIT = 40

BASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": LIMIT},
    "completions": {"prompt": "hi", "max_tokens": LIMIT},
    "responses": {"input": "hi", "max_output_tokens": LIMIT},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": LIMIT},
}
BASES = {api: {"model": "model", "seed": 1, **base} for api, base in BASES.items()}


class Probe(Struct, frozen=True):
    value: Any
    beside: dict[str, Any] = {}  # sent in both requests


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": TOOL, **fields}


_FORMS: dict[str, dict[str, Any]] = {
    "chat": {"structured_outputs": {"json": SCHEMA}},
    "completions": {"structured_outputs": {"json": SCHEMA}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
_TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [_function()],
    "responses": [{"type": "function", **TOOL}],
    "messages": [{"name": "f", "input_schema": TOOL["parameters"]}],
}
# Long enough for two calls, and with a seed that makes two.
_CALLED = {"tool_choice": "required", "seed": 3, "ignore_eos": True}
# Its answer goes on with a thought.
_THINKING = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}],
    "continue_final_message": True,
}
_GREEDY = {"temperature": 0.0}
_REPEATED = {**_GREEDY, "ignore_eos": True}

# Of all APIs that have the field.
SHARED: dict[str, Probe] = {
    "add_generation_prompt": Probe(False),
    "add_special_tokens": Probe(False),
    "allowed_token_ids": Probe([1]),
    "audio": Probe({"format": "wav", "voice": "x"}),
    "bad_words": Probe(["x"]),
    "best_of": Probe(3),
    "chat_template": Probe("x"),
    "chat_template_kwargs": Probe({"tone": "kind"}),
    "documents": Probe([{"text": "x"}]),
    "echo": Probe(True),
    "frequency_penalty": Probe(2.0, _REPEATED),
    "function_call": Probe("auto"),
    "functions": Probe([{"name": "f"}]),
    "guided_choice": Probe(["b", "c"]),
    "guided_grammar": Probe('root ::= "b"'),
    "guided_json": Probe(SCHEMA),
    "guided_regex": Probe("b{3}"),
    "ignore_eos": Probe(True),
    "include_reasoning": Probe(False, _THINKING),
    "include_stop_str_in_output": Probe(True, {"stop": "b", **LETTERS}),
    "instructions": Probe("Be kind."),
    "length_penalty": Probe(2.0),
    "logit_bias": Probe(LETTERS["logit_bias"]),
    "logits_processors": Probe(["x"]),
    "max_completion_tokens": Probe(3, {"ignore_eos": True}),
    "max_output_tokens": Probe(3, {"ignore_eos": True}),
    "max_tokens": Probe(3, {"ignore_eos": True}),
    "messages": Probe([{"role": "user", "content": "hello"}]),
    "metadata": Probe({"user_id": "x"}),
    "min_p": Probe(0.9),
    "min_tokens": Probe(30),
    "mm_processor_kwargs": Probe({"x": 1}),
    "modalities": Probe(["audio"]),
    "model": Probe("another"),
    "n": Probe(2),
    "output_config": Probe({"effort": "high"}),
    "presence_penalty": Probe(2.0, _REPEATED),
    "previous_items": Probe([{"role": "user", "content": "x"}]),
    "priority": Probe(1),
    "prompt_cache_key": Probe("one"),
    "prompt_cache_retention": Probe("24h"),
    "prompt_embeds": Probe("x"),
    "prompt_logprobs": Probe(1),
    "reasoning": Probe({"effort": "high"}),
    "reasoning_effort": Probe("high"),
    "repetition_penalty": Probe(2.0, _REPEATED),
    "request_id": Probe("resp_x"),
    "response_format": Probe({"type": "json_object"}),
    "return_token_ids": Probe(True),
    "seed": Probe(2),
    "service_tier": Probe("flex"),
    "skip_special_tokens": Probe(False, {"logit_bias": {"258": 100}, "ignore_eos": True}),
    "stop": Probe("b", LETTERS),
    "stop_token_ids": Probe([LETTER], LETTERS),
    "stream": Probe(True),
    "stream_options": Probe({"include_usage": True}, {"stream": True}),
    "structured_outputs": Probe({"choice": ["b", "c"]}),
    "suffix": Probe("x"),
    "temperature": Probe(0.0),
    "thinking": Probe({"type": "disabled"}),
    "top_k": Probe(1),
    "top_p": Probe(0.01),
    "truncate_prompt_tokens": Probe(1),
    "use_beam_search": Probe(True),
    "verbosity": Probe("high"),
}
# Of one API: where its fields have other forms.
OWN: dict[tuple[str, str], Probe] = {
    ("chat", "add_special_tokens"): Probe(True),
    ("chat", "continue_final_message"): Probe(
        True, {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]}
    ),
    ("chat", "logprobs"): Probe(True),
    ("chat", "parallel_tool_calls"): Probe(False, {"tools": _TOOLS["chat"], "max_tokens": 200, **_CALLED}),
    ("chat", "prompt_token_ids"): Probe([1, 2, 3]),
    ("chat", "tool_choice"): Probe("required", {"tools": _TOOLS["chat"]}),
    ("chat", "tools"): Probe(_TOOLS["chat"]),
    ("chat", "top_logprobs"): Probe(2, {"logprobs": True}),
    ("completions", "logprobs"): Probe(1),
    ("completions", "prompt"): Probe("hello"),
    ("completions", "prompt_token_ids"): Probe([[1, 2, 3]]),
    ("messages", "stop_sequences"): Probe(["bb"], _FORMS["messages"]),
    ("messages", "system"): Probe("Be kind."),
    ("messages", "tool_choice"): Probe({"type": "any"}, {"tools": _TOOLS["messages"]}),
    ("messages", "tools"): Probe(_TOOLS["messages"]),
    ("responses", "input"): Probe("hello"),
    ("responses", "parallel_tool_calls"): Probe(
        False, {"tools": _TOOLS["responses"], "max_output_tokens": 200, **_CALLED}
    ),
    ("responses", "prompt"): Probe({"id": "pmpt_1"}),
    ("responses", "store"): Probe(False),
    ("responses", "stream_options"): Probe({"include_obfuscation": False}, {"stream": True}),
    ("responses", "text"): Probe({"format": {"type": "json_object"}}),
    ("responses", "tool_choice"): Probe("required", {"tools": _TOOLS["responses"]}),
    ("responses", "tools"): Probe(_TOOLS["responses"]),
}


def probe_of(api: str, name: str) -> Probe:
    """The probe; of a field that has none, the smallest value that the client's types allow."""
    if name == "cache_salt":
        return Probe(f"of {api}")  # new to the replica
    found = OWN.get((api, name)) or SHARED.get(name)
    return Probe(minimal(hints(api).get(name))) if found is None else found
