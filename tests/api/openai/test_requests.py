import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from api.errors import ApiError
from api.openai.engine_requests import DetokenizeRequest, TokenizeRequest
from api.openai.requests import UNSUPPORTED, ChatRequest, CompletionRequest, SamplingFields, Unsupported, read
from api.openai.sampling import OF_THE_MODEL
from tests.api.bodies import REQUIRED, bodies

TYPES: list[type[Struct]] = list(REQUIRED)
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return read(json.dumps({"model": "demo", "messages": [USER]} | fields).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return read(json.dumps({"model": "demo", "prompt": "Hello"} | fields).encode(), CompletionRequest)


def refused(body: bytes | str, request_type: type[Struct]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body.encode() if isinstance(body, str) else body, request_type)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"
    return caught.value


def refused_chat(**fields: Any) -> ApiError:
    return refused(json.dumps({"model": "demo", "messages": [USER]} | fields), ChatRequest)


def refused_completion(**fields: Any) -> ApiError:
    return refused(json.dumps({"model": "demo", "prompt": "Hello"} | fields), CompletionRequest)


def read_or_refused(body: bytes, request_type: type[Struct]) -> None:
    try:
        request = read(body, request_type)
    except ApiError as error:
        json.loads(error.body())
    else:
        msgspec.json.encode(request)
        # What goes to the engine goes as msgpack, whose integers have 64 bits.
        msgspec.msgpack.encode(
            {
                name: getattr(request, name)
                for name in SamplingFields.__struct_fields__
                if isinstance(request, SamplingFields)
            }
        )


# ---- whatever comes


@given(body=st.binary(max_size=60), request_type=st.sampled_from(TYPES))
def test_any_bytes_are_read_or_refused(body: bytes, request_type: type[Struct]) -> None:
    read_or_refused(body, request_type)


@given(data=st.data(), request_type=st.sampled_from(TYPES))
def test_any_field_with_any_value_is_read_or_refused(data: st.DataObject, request_type: type[Struct]) -> None:
    read_or_refused(json.dumps(data.draw(bodies(request_type))).encode(), request_type)


@given(data=st.data(), at=st.integers(0, 60), junk=st.binary(max_size=3))
def test_a_damaged_body_is_read_or_refused(data: st.DataObject, at: int, junk: bytes) -> None:
    body = json.dumps(data.draw(bodies(ChatRequest))).encode()
    read_or_refused(body[:at] + junk + body[at + len(junk) :], ChatRequest)


@pytest.mark.parametrize(
    "value",
    [
        *("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, "1" * 10_000, "1e999", "-1e999", "NaN"),
        *("Infinity", '"\\ud800"', '"\\udc00\\ud800"', '"\\u00"', '"\x00"', "01", "1.", "tru", "'a'", '"a'),
    ],
)
@pytest.mark.parametrize("field", ["seed", "temperature", "stop", "prompt", "tools", "user", "response_format", "zzz"])
def test_json_at_its_worst_is_refused(field: str, value: str) -> None:
    body = f'{{"model": "demo", "prompt": "a", "{field}": {value}}}'.encode()
    read_or_refused(body, CompletionRequest)
    read_or_refused(body.replace(b'"prompt": "a"', b'"messages": [{"role": "user", "content": "hi"}]'), ChatRequest)


def test_a_body_that_is_no_object_that_can_be_read_says_so() -> None:
    assert "not valid JSON" in refused("model=demo", CompletionRequest).message
    assert "not valid JSON" in refused("", CompletionRequest).message
    assert "expected `object`, got `array`" in refused("[]", ChatRequest).message
    body = '{"model": "demo", "prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert "nested too deeply" in refused(body, CompletionRequest).message


# ---- what a refusal says


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1; expected `float` >= 0.0"),
        ({"temperature": "hot"}, "temperature", 'temperature is "hot"; expected `float | null`, got `str`'),
        ({"top_p": 0}, "top_p", "> 0.0"),
        ({"top_p": 1.5}, "top_p", "<= 1.0"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 1.1}, "min_p", "<= 1.0"),
        ({"presence_penalty": 2.1}, "presence_penalty", "<= 2.0"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", ">= -2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0.0"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"max_tokens": -1}, "max_tokens", ">= "),
        ({"max_tokens": 2**31}, "max_tokens", "<= 2147483647"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "min_tokens is 6; the most that may be generated is 5"),
        ({"seed": 2**63}, "seed", "<= 9223372036854775807"),
        ({"seed": 1.5}, "seed", "got `float`"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop": ["a"] * 17}, "stop", "length <= 16"),
        ({"logit_bias": {"a": 1}}, "logit_bias", '{"a":1}'),
        ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100.0"),
        ({"logit_bias": {"-1": 0}}, "logit_bias", ">= 0"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "stop_token_ids[1] is -1"),
        ({"stream_options": {}}, "stream_options", "set stream or leave stream_options out"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "is 1"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        ({"model": None}, "model", "got `null`"),
    ],
)
def test_a_value_out_of_range_is_named_and_quoted(fields: dict[str, Any], param: str, says: str) -> None:
    for error in (refused_chat(**fields), refused_completion(**fields)):
        assert error.param == param
        assert says in error.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [USER, {"role": "king", "content": "x"}]}, "messages[1].role", '"king"; expected one of system,'),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", 'only "assistant" may have none'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            'is "image_url", and "demo" is not a multimodal model; send text',
        ),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[1].content[0].type",
            'is "input_audio", and "demo" is not a multimodal model',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "poem", "poem": "x"}]}]},
            "messages[0].content[0].type",
            'is "poem"; expected "text"',
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is missing"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "is 1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"logprobs": 1}, "logprobs", "is 1"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both set"),
        ({"max_completion_tokens": 3, "min_tokens": 4, "max_tokens": 9}, "min_tokens", "generated is 3"),
    ],
)
def test_a_chat_request_is_checked(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused_chat(**fields)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": []}, "prompt", "is an empty list"),
        ({"prompt": ["a", 1]}, "prompt", "mixes strings, token ids and lists"),
        ({"prompt": [[1], "a"]}, "prompt", "mixes"),
        ({"prompt": ["a"] * 1025}, "prompt", "has 1025 entries; send at most 1024"),
        ({"prompt": [[1]] * 1025}, "prompt", "has 1025 entries"),
        ({"prompt": [1, -1]}, "prompt[1]", "is -1"),
        ({"prompt": [[1, True]]}, "prompt[0][1]", "is true"),
        ({"prompt": None}, "prompt", "is null"),
        ({"prompt": [[1], []]}, "prompt[1]", "length >= 1"),
        ({"prompt_token_ids": [[]]}, "prompt_token_ids[0]", "length >= 1"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"logprobs": True}, "logprobs", "is true"),
        ({"prompt_token_ids": [[1], [2]]}, "prompt_token_ids", "has 2 lists; there are 1 prompts"),
    ],
)
def test_a_completion_request_is_checked(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused_completion(**fields)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    "forged", ["x - at `$.temperature[...]`", "x` - at `$.n`", "x - at `key` in `$.y[...]`", "\n`"]
)
def test_a_value_cannot_forge_where_it_stands(forged: str) -> None:
    error = refused_chat(messages=[{"role": forged, "content": "x"}])
    assert error.param == "messages[0].role"


def test_a_missing_field_is_named() -> None:
    assert refused('{"messages": []}', ChatRequest).param in {"model", "messages"}
    assert refused("{}", CompletionRequest).message == "model is missing; it is required"
    assert refused("{}", DetokenizeRequest).param == "tokens"


def test_log_probabilities_of_the_prompt_are_not_streamed() -> None:
    assert completion(prompt_logprobs=0).prompt_logprobs == 0
    assert chat(prompt_logprobs=20).prompt_logprobs == 20
    assert chat(stream=True, prompt_logprobs=None).prompt_logprobs is None
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 0, "stream": True}):
        assert refused_completion(**wrong).param == refused_chat(**wrong).param == "prompt_logprobs"


# ---- what we cannot do


def test_the_table_and_the_fields_of_the_unsupported_agree() -> None:
    assert set(UNSUPPORTED) == set(Unsupported.__struct_fields__)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_has_no_effect_here_is_refused_by_name(name: str) -> None:
    error = refused_chat(**{name: {"some": "thing"}})
    assert (error.param, error.code) == (name, "unsupported")
    assert "leave it out" in error.message


@pytest.mark.parametrize(("name", "neutral"), [(name, value) for name, some in UNSUPPORTED.items() for value in some])
def test_a_field_that_asks_for_nothing_is_accepted(name: str, neutral: object) -> None:
    chat(**{name: neutral})
    completion(**{name: None})


@pytest.mark.parametrize(
    ("name", "value"), [("echo", 0), ("priority", False), ("suffix", "x"), ("modalities", ["audio"])]
)
def test_what_looks_neutral_and_is_not_is_refused(name: str, value: object) -> None:
    assert refused_completion(**{name: value}).param == name


def test_only_completions_echo_their_prompt() -> None:
    error = refused_chat(echo=True)
    assert (error.param, error.code) == ("echo", "unsupported")
    assert not chat(echo=False).echo and not completion(echo=None).echo
    assert completion(echo=True, max_tokens=0, logprobs=1).scored == 1
    assert completion(echo=True, logprobs=1, prompt_logprobs=3).scored == 3
    assert completion(logprobs=1).scored is None


def test_nothing_is_generated_only_where_the_prompt_is_echoed() -> None:
    assert "set echo" in refused_completion(max_tokens=0).message
    assert refused_chat(max_tokens=0).param == "max_tokens"
    assert refused_completion(max_tokens=0, echo=True, min_tokens=1).param == "min_tokens"


def test_a_stream_has_no_log_probabilities_of_an_echoed_prompt() -> None:
    assert refused_completion(echo=True, stream=True, logprobs=0).param == "echo"
    assert completion(echo=True, stream=True).echo


# ---- what comes out


def test_null_stands_for_the_default() -> None:
    plain = chat()
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name not in {"model", "messages", *UNSUPPORTED}}
    assert chat(**nulls) == plain
    assert (plain.presence_penalty, plain.n, plain.tools, plain.stream) == (0.0, 1, [], False)
    assert plain.temperature == OF_THE_MODEL
    assert completion(max_tokens=None).output_limit is None
    assert completion().usual_output == 16


def test_minus_one_for_top_k_means_all_and_the_new_name_of_the_limit_wins() -> None:
    assert chat(top_k=-1).top_k == 0
    assert chat().output_limit is None
    assert chat().usual_output is None
    assert chat(max_tokens=5).output_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=3).output_limit == 3


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert (chat().alternatives, completion().alternatives) == (None, None)
    assert chat(logprobs=True).alternatives == 0
    assert chat(logprobs=True, top_logprobs=3).alternatives == 3
    assert completion(logprobs=0).alternatives == 0
    assert completion(logprobs=5).alternatives == 5


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (list(range(5000)), [list(range(5000))]),
    ],
)
def test_a_prompt_comes_in_four_shapes(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": [USER]}, {"prompt": None, "messages": None}])
def test_tokenizing_takes_either_a_prompt_or_messages(fields: dict[str, Any]) -> None:
    assert "send one of them" in refused(json.dumps(fields), TokenizeRequest).message


def test_logit_bias_has_as_many_entries_as_at_openai() -> None:
    assert len(completion(logit_bias={str(i): 1 for i in range(300)}).logit_bias) == 300
    error = refused_completion(logit_bias={str(i): 1 for i in range(301)})
    assert error.param == "logit_bias" and "300" in error.message
