import json
from typing import Any

import pytest

from router.proxy.streams.fields import NOT_CONTINUED, OTHER_PROMPT, WHOLE_OUTPUT, decode_asked, not_resumable

# Fields of vLLM 0.33 and SGLang 0.5.23 that mean the same for a prompt with half its answer as for the prompt alone.
SAME_FOR_EACH_TOKEN = frozenset(
    """model seed temperature top_p top_k min_p logit_bias allowed_token_ids stream user priority request_id rid
    session_id custom_labels cache_salt extra_key lora_path data_parallel_rank stream_interval length_penalty
    spaces_between_special_tokens include_stop_str_in_output no_stop_trim return_tokens_as_token_ids
    routed_experts_prompt_start routed_experts_start_len truncation_side""".split()  # noqa: SIM905
)
# Fields of prompts with pictures or sound, whose tokens the router does not know, or of SGLang's chats, whose token ids
# it does not get: neither can be continued.
NOT_KNOWN = frozenset(
    """mm_payload media_io_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video images_config video_config
    separate_reasoning stream_reasoning thinking task""".split()  # noqa: SIM905
)
CLASSIFIED = frozenset(
    {*WHOLE_OUTPUT, *NOT_CONTINUED, *OTHER_PROMPT, *decode_asked(b"{}").__struct_fields__}
    | SAME_FOR_EACH_TOKEN
    | NOT_KNOWN
)


def asked(**fields: Any) -> str | None:
    return not_resumable(json.dumps({"model": "m", "prompt": "x"} | fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True, "temperature": 0, "top_p": 0.5, "seed": 1, "max_tokens": 9, "user": "u"},
        {"n": 1, "echo": False, "stop": [], "suffix": None, "logprobs": False, "repetition_penalty": 1.0, "tools": []},
        {"response_format": {"type": "text"}, "guided_json": None, "min_tokens": 0, "presence_penalty": 0.0},
        {"bad_words": [], "vllm_xargs": {}, "return_prompt_text": False, "repetition_detection": None},
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
        ("bad_words", ["a b"]),
        ("stop_regex", "a+"),
        ("regex", "a+"),
        ("ebnf", "a"),
        ("json_schema", "{}"),
        ("watermarking", True),
        ("repetition_detection", {}),
        ("vllm_xargs", {"a": 1}),
        ("logprob_token_ids", [1]),
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("return_hidden_states", True),
        ("return_hidden_states", "last"),
    ],
)
def test_what_depends_on_the_whole_output_is_named(name: str, value: Any) -> None:
    assert asked(**{name: value}) == name
