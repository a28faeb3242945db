"""Completions that begin with their prompt, and the best of several candidates."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from api.native import Native, pack_ids
from api.openai.requests import CompletionRequest, read
from api.tokens.tokenizer import ByteTokenizer
from replica.http.forms import Form, form_of
from replica.http.work import Served, Work, plan
from replica.messages import TokenLogprobs

BYTES = ByteTokenizer()
SERVED = Served(max_model_len=1000, tokenizer=BYTES)


def planned(prompts: list[list[int]], resumed: Sequence[list[int]] = (), **fields: Any) -> Work:
    native = Native(resume_token_ids=list(map(pack_ids, resumed)))
    request = read(json.dumps({"model": "demo", "prompt": prompts} | fields).encode(), CompletionRequest)
    return plan(request, native, prompts, SERVED, itertools.count(1).__next__)


def answered(work: Work, said: list[str]) -> Any:
    """The whole answer when the choices say this, a token for each letter."""
    form = form_of(work, "demo", BYTES)
    asks = work.request
    for part, text in zip(work.parts, said, strict=True):
        assert part.submit is not None
        form.begin(part.choice, 0)
        if part.submit.sampling.prompt_logprobs is not None:
            form.tell_prompt(part.choice, scores(work.prompts[part.choice.index // asks.n]))
        of_tokens = [TokenLogprobs(-1.0, [(97, -0.5)], 1) for _ in text]
        form.add(part.choice, part.choice.feed(list(text.encode()), "length", of_tokens))
    return finished(form)


def scores(prompt: Any) -> list[TokenLogprobs]:
    """Log probabilities of a prompt: its second token has -2, its third -3, and so on."""
    return [TokenLogprobs(-float(place), [(98, -0.5), (97, -0.7)], 3) for place in range(2, len(prompt) + 1)]


def finished(form: Form) -> Any:
    for _ in form.prepare():
        pass
    return json.loads(form.end())


def test_the_text_begins_with_the_prompt() -> None:
    texts = planned([[1]], prompt="käse ", echo=True, max_tokens=2)
    assert answered(texts, ["ab"])["choices"][0]["text"] == "käse ab"
    ids = planned([[*b"yes", *"ä".encode(), BYTES.eos]], echo=True, max_tokens=2)
    assert answered(ids, ["ab"])["choices"][0]["text"] == "yesäab"


def test_log_probabilities_begin_with_those_of_the_prompt() -> None:
    prompt = [*"aä".encode(), *b"b"]
    [choice] = answered(planned([prompt], echo=True, logprobs=1, max_tokens=2), ["xy"])["choices"]
    assert choice["text"] == "aäbxy"
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa4", "b", "x", "y"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0, -4.0, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.5, "bytes:\\xc3": -2.0}]
    assert "prompt_logprobs" not in choice


def test_a_prompt_alone_is_scored_without_an_answer() -> None:
    work = planned([[97, 98, 99], [100, 101]], echo=True, logprobs=0, max_tokens=0)
    assert [part.submit and part.submit.sampling.max_tokens for part in work.parts] == [1, 1]
    found = answered(work, ["x", "y"])
    assert [choice["text"] for choice in found["choices"]] == ["abc", "de"]
    assert [choice["logprobs"]["token_logprobs"] for choice in found["choices"]] == [[None, -2.0, -3.0], [None, -2.0]]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length", "length"]
    assert found["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": None,
    }


def test_a_streamed_choice_says_its_prompt_once_and_first() -> None:
    work = planned([[97, 98]], echo=True, stream=True, max_tokens=9)
    form, choice = form_of(work, "demo", BYTES), work.parts[0].choice
    form.begin(choice, 0)
    first, *others = "é".encode(), b"z"
    events = [form.add(choice, choice.feed([byte])) for byte in [*first, *others[0]]]
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events if event]
    assert texts == ["ab", "é", "z"]


def test_a_resumed_stream_does_not_say_its_prompt_again() -> None:
    work = planned([[97, 98]], [[99]], echo=True, stream=True, max_tokens=9)
    form, choice = form_of(work, "demo", BYTES), work.parts[0].choice
    assert b'"text":"d"' in form.add(choice, choice.feed([100]))
