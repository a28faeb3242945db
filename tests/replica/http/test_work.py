"""Requests to the engine, measured against the model."""

import itertools
import json
from typing import Any

import pytest
from msgspec.structs import replace

from api.errors import ApiError
from api.native import Native, pack_ids
from api.openai.requests import CompletionRequest, read
from api.openai.sampling import SamplingDefaults
from api.tokens.tokenizer import ByteTokenizer
from replica.http.forms import AT_ONCE, form_of
from replica.http.request_reader import ParsedRequest
from replica.http.work import MAX_PROMPT_LOGPROBS, Served, Work, plan, size_of_plan
from replica.messages import TokenLogprobs

SERVED = Served(max_model_len=100, tokenizer=ByteTokenizer())


def asked(**fields: Any) -> CompletionRequest:
    return read(json.dumps({"model": "demo", "prompt": "x"} | fields).encode(), CompletionRequest)


def planned(request: CompletionRequest, native: Native | None = None) -> Work:
    prompts = [[1]] * len(request.prompts)
    return plan(request, native or Native(), prompts, SERVED, itertools.count(1).__next__)


def resumed(*said: list[int]) -> Native:
    return Native(resume_token_ids=list(map(pack_ids, said)))


def seeds(work: Work) -> list[int]:
    return [part.submit.sampling.seed for part in work.parts if part.submit is not None]


def test_choice_i_of_a_prompt_samples_with_the_clients_seed_plus_i() -> None:
    assert seeds(planned(asked(prompt=["a", "a"], n=3, seed=5))) == [5, 6, 7, 5, 6, 7]
    assert seeds(planned(asked(n=2, seed=2**63 - 1))) == [2**63 - 1, 0]


def test_without_a_clients_seed_every_choice_has_its_own() -> None:
    assert seeds(planned(asked(prompt=["a", "a"], n=2), Native(seed=5))) == [5, 6, 7, 8]
    assert len(set(seeds(planned(asked(prompt=["a", "a"], n=2))))) == 4


def test_what_a_request_does_not_say_of_its_sampling_the_model_says() -> None:
    usual = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    for fields, expected in (
        ({}, (0.2, 0.9, 20, 0.1, 1.1)),
        ({"temperature": None, "top_k": -1, "top_p": 1}, (0.2, 1, 0, 0.1, 1.1)),
        ({"temperature": 1, "min_p": 0, "repetition_penalty": 1}, (1, 0.9, 20, 0, 1)),
    ):
        work = plan(asked(**fields), Native(), [[1]], replace(SERVED, sampling=usual), lambda: 1)
        [submit] = [part.submit for part in work.parts]
        assert submit is not None
        drawn = submit.sampling
        assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p, drawn.repetition_penalty) == expected


@pytest.mark.parametrize(("fields", "most"), [({"max_tokens": 3}, 3), ({"max_tokens": None}, 16)])
def test_more_tokens_than_could_have_been_generated_are_refused(fields: dict[str, Any], most: int) -> None:
    planned(asked(n=2, **fields), resumed([1], [1] * most))
    with pytest.raises(ApiError) as caught:
        planned(asked(n=2, **fields), resumed([1], [1] * (most + 1)))
    assert (caught.value.status, caught.value.param) == (400, "resume_token_ids[1]")
    assert f"{most + 1} tokens" in caught.value.message and caught.value.message.endswith(f" {most}")


def test_the_first_choice_of_each_prompt_says_its_log_probabilities() -> None:
    work = planned(asked(prompt=["a", "b"], n=3, prompt_logprobs=2, seed=5))
    assert [part.submit and part.submit.sampling.prompt_logprobs for part in work.parts] == [2, None, None] * 2
    assert seeds(work) == [5, 6, 7] * 2


def test_log_probabilities_of_a_prompt_are_computed_again_where_it_is_resumed() -> None:
    work = planned(asked(n=2, max_tokens=1, prompt_logprobs=0), resumed([1], [1]))
    assert [part.submit and part.submit.output for part in work.parts] == [b"", b""]


def test_more_log_probabilities_of_prompts_than_can_be_told_are_refused() -> None:
    served = Served(max_model_len=10**6, tokenizer=ByteTokenizer())

    def plan_for(tokens: int, **fields: Any) -> Work:
        return plan(asked(**fields), Native(), [[1] * tokens], served, itertools.count(1).__next__)

    most = MAX_PROMPT_LOGPROBS // 2
    plan_for(most, prompt_logprobs=1)
    for tokens, fields in ((most + 1, {"prompt_logprobs": 1}), (most, {"prompt_logprobs": 1, "n": 2})):
        with pytest.raises(ApiError) as caught:
            plan_for(tokens, **fields)
        assert (caught.value.status, caught.value.param) == (400, "prompt_logprobs")
        assert str(MAX_PROMPT_LOGPROBS) in caught.value.message


def test_many_log_probabilities_are_put_into_words_in_small_steps() -> None:
    work = plan(
        asked(prompt_logprobs=0), Native(), [[97] * (5 * AT_ONCE)], replace(SERVED, max_model_len=10**6), lambda: 1
    )
    form = form_of(work, "demo", SERVED.tokenizer)
    form.tell_prompt(work.parts[0].choice, [TokenLogprobs(-1.0, [], 1)] * (5 * AT_ONCE - 1))
    assert len(list(form.prepare())) == 5
    assert len(json.loads(form.end())["choices"][0]["prompt_logprobs"]) == 5 * AT_ONCE


def test_many_resumed_tokens_are_not_decoded_on_the_event_loop() -> None:
    few, many = (ParsedRequest(asked(), resumed([1] * count), []) for count in (10, 10_000))
    assert size_of_plan(few) < 1000
    assert size_of_plan(many) > 100_000


def test_a_routers_salt_stands_in_place_of_the_clients() -> None:
    def salts(native: Native) -> list[str | None]:
        parts = planned(asked(cache_salt="own"), native).parts
        return [part.submit.cache_salt for part in parts if part.submit is not None]

    assert (salts(Native()), salts(Native(cache_salt="tenant own"))) == (["own"], ["tenant own"])
