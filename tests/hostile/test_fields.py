"""Fields and headers that engines read: each is known as harmless, obeyed or withheld, and no spelling hides one.

`qualification/engines/fields.json` lists them, from the schemas and the source of vLLM and SGLang. If a test here names
a new one, look up what the engine does with it. One that names a host, a rank, a socket or a place in a queue belongs
in `router/proxy/withheld.py`, any other one below.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from api.native import FRAMES_TYPE, REQUEST_TYPE, Native, envelope
from router.prompts.prompt import Peek
from router.prompts.reading.client import LONG_BODY_BYTES
from router.proxy.headers import TO_REPLICA
from router.proxy.withheld import NESTING, PLACING, TRANSFER
from tests.router.scripted import CHAT, COMPLETIONS, MODEL, Script, Scripted, chat, connect, says, served

FOUND: dict[str, Any] = json.loads((Path(__file__).parents[2] / "qualification/engines/fields.json").read_text())
WITHHELD = {*TRANSFER, *PLACING}
OBEYED = {field.name for field in fields(Peek)} | {
    *("chat_template_kwargs", "documents", "input", "previous_response_id", "priority", "system", "tool_choice"),
}
# By the name alone, wherever it stands: of what is generated and how, of prompts and media, of the answer's form.
_NAMES = """
__pydantic_msgspec_exclude__ _all_stop_token_ids _backend _backend_was_auto _bad_words_token_ids _eos_token_id
_watermarking_skipped add_generation_prompt add_special_tokens allowed_domains allowed_token_ids apply_softmax
arguments async at_least_one audio_data audio_embeds audio_url background bad_words begin best_of betas
blocked_domains budget_tokens call_id caller chat_template choice chunk_size closed comparison_response_id content
content_hash content_parts continue_final_message continuous_usage_stats custom_labels custom_logit_processor
custom_params data data_1 data_2 decision_layout defer_loading description detail detokenize dimensions
disable_additional_properties disable_any_whitespace disable_parallel_tool_use display display_height_px
display_number display_width_px early_stopping ebnf effort embed_dtype embed_override_token_id embed_overrides
enable_response_messages encoding_format end endianness external_trace_header extra_key features file flat_logprobs
format fps frequency_penalty function grammar guided_decoding_backend history_tool_call_cnt hotwords id ignore_eos
image image_data image_embeds image_pil image_url images_config include include_reasoning
include_stop_str_in_output include_usage index input_audio input_embeds input_ids input_schema instruct instruction
instructions is_cross_encoder_request is_error item_embed_overrides item_first items json json_object json_schema
key_order kwargs_data label_token_ids language late_chunking_params length length_penalty log_metrics logit_bias
logprob_token_ids lora_path max_completion_tokens max_dynamic_patch max_frames max_image_tokens max_long_side_pixel
max_output_tokens max_pattern_size max_tokens max_tokens_per_doc max_tokens_per_frame max_tokens_per_query
max_tool_calls max_uses media_io_kwargs metadata min_count min_dynamic_patch min_p min_pattern_size min_tokens
mm_hashes mm_metadata mm_payload mm_placeholders mm_processor_kwargs modalities mode multi_item_delimiter_indices
name namespace no_stop_trim offset output_config output_kind output_mode output_text_buffer_length padding
parallel_tool_calls parameters parse_context phase positional_embed_overrides prefix preprocess_kwargs
presence_penalty previous_input_messages prewarm prompt_cache_options prompt_cache_retention prompt_embeds
prompt_logprob_start prompt_logprob_token_ids queries query query_embed_overrides reasoning reasoning_content
reasoning_effort reasoning_ended reasoning_parser_kwargs received_time regex remaining repetition_detection
repetition_penalty request_id response_format return_cached_tokens_details return_documents
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states
return_input_ids_in_sglext return_meta_info return_mm_kwargs return_output_ids_in_sglext
return_pooled_hidden_states return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask
return_spec_tokens_details return_token_ids return_token_logprobs return_token_offsets return_token_strs
return_tokens_as_token_ids return_weight_versions rid role routed_experts_prompt_start routed_experts_start_len
safety_identifier sampling_logprobs_mode schema schema_ score_extraction_token separate_reasoning session_id
session_params signature skip_clone skip_reading_prefix_cache skip_special_tokens source
spaces_between_special_tokens status stop stop_regex stop_sequences stop_token_ids store
stream_continuous_usage_stats stream_include_usage stream_interval stream_options stream_reasoning strict
structural_tag structural_tag_schema structured_outputs structures suffix summary task task_budget temperature text
text_1 text_2 thinking thinking_token_budget timestamp_granularities timestamp_granularities[] title to_language
token_ids token_indices_to_pool token_offsets tokens tool tool_call_id tool_calls tool_name tool_use_id top_k
top_logprobs top_n top_p total trace_decode_token_ids triggers truncate_prompt_tokens truncation truncation_side
ttl type url use_activation use_audio_in_video use_beam_search user uuid video video_config video_data video_embeds
video_url watermark watermarking whitespace_pattern
"""
HARMLESS = set(_NAMES.split())
# Written by the router, or no header of the engines' own API.
WRITTEN = {"authorization", "content-type", "x-api-key", "x-data-parallel-rank", "x-request-id"}
PASSED = {name.decode() for name in TO_REPLICA}
HARMLESS_HEADERS = {"traceparent", "tracestate", "x-session-id"}
# They name ranks, hosts, an order, a compression that the router does not read, or another form of the answer.
_HEADERS = """
endpoint-load-metrics-format x-anthropic-billing-header x-body-compressed x-exa-integration
x-override-bootstrap-host x-override-bootstrap-port x-override-bootstrap-room x-override-conversation-id
x-override-disagg-prefill-dp-rank x-override-priority x-override-rid x-override-routed-dp-rank x-sglext-ids-framed
x-sglext-return-input-ids x-sglext-return-output-ids x-smg-routing-key x-vllm-priority
"""
DROPPED = set(_HEADERS.split())
SAGEMAKER = {f"x-amzn-sagemaker-{name}" for name in ("adapter-identifier", "adapter-alias", "session-id")}

NAMED = {"model": MODEL, "max_tokens": 9, "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
JSON_ROUTES = (
    *(CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"),
    *("/inference/v1/generate", "/v1/audio/speech", "/v1/images/edits", "/v1/completions/render", "/classify"),
)


def unknown(found: Iterable[str]) -> set[str]:
    """The fields that nobody has looked at, and withheld ones where the router does not look for them."""
    beyond = set[str]()
    for name in found:
        *outer, leaf = name.split(".")
        is_withheld = leaf in WITHHELD and set(outer) <= {*NESTING}
        if not is_withheld and leaf not in OBEYED | HARMLESS | {*NESTING}:
            beyond.add(name)
    return beyond


def test_every_field_that_an_engine_reads_is_known() -> None:
    assert not unknown(FOUND["fields"])
    listed = {name.rpartition(".")[2] for name in FOUND["fields"]}
    assert WITHHELD | {*NESTING} <= listed, "none is withheld that no engine has"
    assert listed >= HARMLESS, "a field that is gone is no longer called harmless"


def test_a_new_field_is_found() -> None:
    planted = ["prefill_host", "sampling_params.kv_peer", "messages.content.ec_transfer_params"]
    assert unknown([*FOUND["fields"], *planted]) == set(planted)


def test_every_header_that_an_engine_reads_is_known() -> None:
    assert set(FOUND["headers"]) - WRITTEN - HARMLESS_HEADERS == DROPPED
    assert PASSED.isdisjoint(DROPPED | SAGEMAKER | WRITTEN) and PASSED >= HARMLESS_HEADERS


@pytest.mark.parametrize("native", [False, True])
async def test_a_request_takes_along_a_known_set_of_headers(native: bool) -> None:
    own = {"host", "content-type", "content-length", "x-request-id"}
    replica = Scripted("r", says(), native=native)
    async with served(replica) as running, connect(running.port) as client:
        for path in (CHAT, COMPLETIONS, "/v1/embeddings", "/v1/messages", "/tokenize"):
            body = json.dumps(NAMED).encode()
            lines = [f"POST {path} HTTP/1.1", "host: h", f"content-length: {len(body)}", f"accept: {FRAMES_TYPE}"]
            given = {*FOUND["headers"], *SAGEMAKER, *PASSED, "cookie", "X-VLLM-PRIORITY", "x_vllm_priority"}
            lines += [f"{name}: 1" for name in sorted(given - WRITTEN)]
            client.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            assert (await client.answer()).status == 200
            sent = dict(replica.calls[-1].headers)
            assert set(sent) - PASSED - own == ({"accept"} if sent.get("accept") == FRAMES_TYPE else set())
            assert ("accept" in sent) is (native and sent["content-type"] == REQUEST_TYPE), "the router asks for frames"
            assert set(sent) >= PASSED - {"accept-encoding"}


UNREAD = {
    "with a byte order mark": json.dumps(NAMED).encode("utf-8-sig"),
    "in UTF-16": json.dumps(NAMED).encode("utf-16"),
    "in UTF-16 without a mark": json.dumps(NAMED).encode("utf-16-le"),
    "in UTF-32": json.dumps(NAMED).encode("utf-32"),
    "with NaN": json.dumps(NAMED | {"temperature": float("nan")}).encode(),
    "with Infinity within": json.dumps(NAMED | {"logit_bias": {"1": float("inf")}}).encode(),
    "with more behind it": json.dumps(NAMED).encode() + b"{}",
    "nested too deeply": json.dumps(NAMED).encode()[:-1] + b',"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a list": b"[%b]" % json.dumps(NAMED).encode(),
}


@pytest.mark.parametrize("size", [0, LONG_BODY_BYTES + 1], ids=["small", "large"])
@pytest.mark.parametrize("kind", UNREAD)
async def test_a_body_that_an_engine_might_read_and_this_router_does_not_is_refused(kind: str, size: int) -> None:
    script = Script(says())
    body = UNREAD[kind]
    if size:  # in the encoding of the body, whose mark stays at its head
        space = {"UTF-16": b" \0", "UTF-32": b" \0\0\0"}.get(kind[3:9], b" ")
        body += space * (size // len(space))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for path in JSON_ROUTES:
            for content_type in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
                answer = await client.post(path, body, content_type=content_type)
                assert answer.status == 400, (path, answer.body)
    assert not script.calls


async def test_a_body_is_sent_on_as_the_json_that_was_read() -> None:
    script = Script(says())
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for content_type in ("text/plain", f"{REQUEST_TYPE}\x85", f"{REQUEST_TYPE}\xa0", "multipart/form-data\x85"):
            for path in JSON_ROUTES:
                client.write(b"POST %b HTTP/1.1\r\nhost: h\r\n" % path.encode())
                body = json.dumps(NAMED | {"cache_salt": "s"}).encode()
                client.write(f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode("latin-1"))
                client.write(body)
                assert (await client.answer()).status == 200
                assert script.calls[-1].header("content-type") == "application/json"


@pytest.mark.parametrize("space", [b"\xa0", b"\x85", b"\x0b", b"", b"; charset=utf-8"])
async def test_no_client_sends_an_envelope(space: bytes) -> None:
    script = Script(says())
    body = envelope(Native(priority=-1e6, cache_salt="of another")) + json.dumps(chat()).encode()
    head = b"content-length: %d\r\ncontent-type: %b%b\r\n\r\n" % (len(body), REQUEST_TYPE.encode(), space)
    async with served(*script.replicas(1, native=True)) as running:
        for path in JSON_ROUTES:
            async with connect(running.port) as client:
                client.write(b"POST %b HTTP/1.1\r\nhost: h\r\n" % path.encode() + head + body)
                assert (await client.answer()).status == 400
    assert not script.calls


async def test_trailers_are_no_headers_of_the_request() -> None:
    script = Script(says())
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for path in (CHAT, "/v1/embeddings"):
            body = json.dumps(chat()).encode()
            client.send("POST", path, transfer_encoding="chunked", trailer="content-type")
            client.write(b"%x\r\n%b\r\n0\r\n" % (len(body), body))
            client.write(b"content-type: %b\r\nx-own: 1\r\nupgrade: h2c\r\n\r\n" % REQUEST_TYPE.encode())
            assert (await client.answer()).status == 200
            call = script.calls[-1]
            assert call.header("x-own") is None and REQUEST_TYPE not in (call.header("content-type") or "")


FORM = "multipart/form-data; boundary=b"


def form(name: str, value: str) -> bytes:
    file = 'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF'
    return f'--b\r\n{file}\r\n--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n--b--\r\n'.encode()


@pytest.mark.parametrize("size", [1, LONG_BODY_BYTES])
async def test_a_form_goes_on_as_it_came_without_fields_of_the_routers(size: int) -> None:
    script = Script(says())
    refused = form("vllm_xargs", json.dumps({"kv_transfer_params": "x" * size}))
    taken = form("prompt", "x" * size)
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"):
            answer = await client.post(path, refused, content_type=FORM)
            assert answer.status == 400 and "vllm_xargs" in answer.error["message"]
            assert (await client.post(path, taken, content_type=FORM)).status == 200
            assert (script.calls[-1].body, script.calls[-1].header("content-type")) == (taken, FORM)
    assert len(script.calls) == 3


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/health"])
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"host: h\r\ntransfer-encoding: gzip, chunked\r\n", (501, "transfer_encoding_unknown")),
        (b"transfer-encoding: chunked\r\n", (400, "invalid_host")),
        (b"host: h\r\nHost: h\r\ntransfer-encoding: chunked\r\n", (400, "invalid_host")),
    ],
)
async def test_a_head_that_servers_read_differently_is_refused(path: str, lines: bytes, told: tuple[int, str]) -> None:
    script = Script(says())
    body = json.dumps(chat()).encode()
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        client.write(b"POST %b HTTP/1.1\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (path.encode(), lines, len(body), body))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == told
    assert not script.calls
