import json
import math

from api import responses
from api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    Delta,
    Model,
    ModelList,
    encode,
    usage,
)
from api.tokens.tokenizer import ByteTokenizer
from tests.late import openai

BYTES = ByteTokenizer()
CHOSEN = [(97, -0.5, [(97, -0.5), (98, -1.5)]), (0xC3, -math.inf, [(0xA9, -2.0)])]


def test_a_completion_is_one_for_the_openai_client() -> None:
    choice = CompletionChoice(
        index=0, text="a", finish_reason="stop", logprobs=responses.completion_logprobs(BYTES, CHOSEN, 10)
    )
    whole = Completion(id="cmpl-1", created=1, model="demo", choices=[choice], usage=usage(9, 2, 8))
    read = openai.types.Completion.model_validate_json(encode(whole), strict=True)
    assert read.usage is not None and read.usage.prompt_tokens_details is not None
    assert (read.usage.total_tokens, read.usage.prompt_tokens_details.cached_tokens) == (11, 8)
    logprobs = read.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3"]
    assert logprobs.text_offset == [10, 11]
    assert logprobs.token_logprobs == [-0.5, -9999.0]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"bytes:\\xa9": -2.0, "bytes:\\xc3": -9999.0}]


def test_a_chat_completion_is_one_for_the_openai_client() -> None:
    choice = ChatChoice(
        index=0,
        message=ChatMessage(content="a"),
        finish_reason="length",
        logprobs=responses.chat_logprobs(BYTES, CHOSEN),
    )
    whole = ChatCompletion(id="chatcmpl-1", created=1, model="demo", choices=[choice], usage=usage(9, 2, 8))
    read = openai.types.chat.ChatCompletion.model_validate_json(encode(whole), strict=True)
    assert read.choices[0].message.content == "a"
    logprobs = read.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert logprobs.content[0].top_logprobs[1].token == "b"
    assert (logprobs.content[1].bytes, logprobs.content[1].logprob) == ([0xC3], -9999.0)


def test_log_probabilities_of_a_prompt_are_as_vllm_writes_them() -> None:
    unlikely = responses.prompt_logprob(BYTES, 97, -math.inf, 4, [(98, -0.5), (0xC3, -1.5), (99, -1.5)])
    assert json.loads(encode(CompletionChoice(index=0, text="", prompt_logprobs=[None, unlikely])))[
        "prompt_logprobs"
    ] == [
        None,
        {
            "97": {"logprob": -9999.0, "rank": 4, "decoded_token": "a"},
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "195": {"logprob": -1.5, "rank": 2, "decoded_token": "\ufffd"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    likely = responses.prompt_logprob(BYTES, 99, -1.5, 2, [(98, -0.5), (99, -1.5)])
    assert {token: found.rank for token, found in likely.items()} == {"99": 2, "98": 1}
    assert b"prompt_logprobs" not in encode(CompletionChoice(index=0, text=""))


def test_a_chunk_is_one_for_the_openai_client() -> None:
    choice = ChatChunkChoice(index=1, delta=Delta(content="é"))
    chunk = ChatChunk(id="chatcmpl-1", created=1, model="demo", choices=[choice])
    read = openai.types.chat.ChatCompletionChunk.model_validate_json(encode(chunk), strict=True)
    assert read.choices[0].delta.content == "é"
    assert read.usage is None


def test_what_openai_leaves_out_is_left_out_and_what_it_sends_as_null_is_sent() -> None:
    choice = ChatChunkChoice(index=0, delta=Delta(role="assistant", content=""))
    chunk = ChatChunk(id="chatcmpl-1", created=1, model="demo", choices=[choice])
    assert json.loads(encode(chunk)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "demo",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert b'"usage":null' in encode(ChatChunk(id="x", created=1, model="demo", choices=[], usage=None))


def test_models_are_a_list_for_the_openai_client() -> None:
    listed = json.loads(encode(ModelList(data=[Model(id="demo", created=1, max_model_len=8192)])))
    assert openai.types.Model.model_validate(listed["data"][0]).id == "demo"
    assert listed["data"][0]["max_model_len"] == 8192


def test_tokens_without_a_text_stay_apart_in_the_alternatives() -> None:
    logprobs = responses.completion_logprobs(BYTES, [(300, -0.5, [(300, -0.5), (301, -1.5)])], 0)
    assert logprobs.tokens == ["token_id:300"]
    assert logprobs.top_logprobs == [{"token_id:300": -0.5, "token_id:301": -1.5}]
