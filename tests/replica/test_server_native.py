"""Real models behind real HTTP equal transformers, cached or not, and refuse unsupported requests.

Tolerances: in float32 the greedy tokens are equal and log probabilities differ by less than 1e-4; in bfloat16 by less
than 0.15, and a token is at most that much less likely than the likeliest.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import transformers
from openai import AsyncOpenAI
from openai.types import Completion

from api.tokens.tokenizer import ByteTokenizer
from tests.events.processes import DEADLINE_S
from tests.replica.models import LENGTH, VOCABULARY, logits, saved
from tests.replica.natives import Serving, ask, completion, native, natives, refused, tokens
from tests.replica.serving import Replica

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 100, 131)
OTHERS = ("llama", "mistral", "qwen2")
EXACT, NEAR = 1e-4, 0.15
ANSWER = 12
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    with natives(lambda name: saved(name, folder)) as started:
        yield started


@pytest.fixture
def served(serving: Serving) -> Replica:
    """The one that most tests ask: a Llama with llama3's scaling, whose config.json names an end of sequence."""
    return serving("llama3")


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


# ---- the same as transformers


class Told:
    """The part of one choice that a client has read."""

    def __init__(self, answers: Sequence[Completion]) -> None:
        choices = [choice.model_dump() for answer in answers for choice in answer.choices]
        self.token_ids: list[int] = [token for choice in choices for token in choice["token_ids"]]
        self.logprobs: list[float] = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        self.top: list[dict[str, float]] = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
        self.finish_reason: str = choices[-1]["finish_reason"]


async def told(client: AsyncOpenAI, prompt: list[int], *, stream: bool, logprobs: int) -> Told:
    extra = {"ignore_eos": True, "return_token_ids": True}
    if not stream:
        return Told(
            [
                await client.completions.create(
                    model="model",
                    prompt=prompt,
                    temperature=0,
                    max_tokens=ANSWER,
                    logprobs=logprobs,
                    extra_body=extra,
                )
            ]
        )
    events = await client.completions.create(
        model="model",
        prompt=prompt,
        temperature=0,
        max_tokens=ANSWER,
        logprobs=logprobs,
        stream=True,
        extra_body=extra,
    )
    return Told([event async for event in events])


def text(token: int) -> str:
    """Name of a one-byte token in a legacy answer."""
    raw = BYTES.token_bytes(token)
    return raw.decode() if raw.isascii() else f"bytes:\\x{token:02x}"


def assert_is_transformers(name: str, prompt: list[int], told: Told, logprobs: int) -> None:
    said = logits(name, [*prompt, *told.token_ids[:-1]])[len(prompt) - 1 :]
    assert told.token_ids == said.argmax(-1).tolist()
    assert told.finish_reason == "length"
    for row, token, logprob, top in zip(said.log_softmax(-1), told.token_ids, told.logprobs, told.top, strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=EXACT)
        best = row.topk(logprobs)
        for other, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            if other < BYTES.vocab_size:  # the others have no text to be named by
                assert top[text(other)] == pytest.approx(value, abs=EXACT)


@pytest.mark.parametrize("name", ["llama3", "qwen3", *(pytest.param(name, marks=pytest.mark.chaos) for name in OTHERS)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_crowd_of_mixed_lengths_is_told_what_transformers_says(
    name: str, stream: bool, serving: Serving
) -> None:
    asked = prompts(seed=1 + stream)
    alternatives = [0, 20, *range(1, len(asked) - 1)]
    async with AsyncOpenAI(base_url=f"{serving(name).url}/v1", api_key="none", max_retries=0) as client:
        pairs = zip(asked, alternatives, strict=True)
        crowd = await asyncio.gather(*(told(client, one, stream=stream, logprobs=top) for one, top in pairs))
    for prompt, answer, top in zip(asked, crowd, alternatives, strict=True):
        assert_is_transformers(name, prompt, answer, top)


@pytest.mark.chaos
async def test_bfloat16_is_near(serving: Serving) -> None:
    served, asked = serving("qwen3", "--dtype", "bfloat16"), prompts([3, 16, 45, 100])
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        crowd = await asyncio.gather(*(told(client, prompt, stream=True, logprobs=0) for prompt in asked))
    for prompt, answer in zip(asked, crowd, strict=True):
        expected = logits("qwen3", [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :].log_softmax(-1)
        for row, token, logprob in zip(expected, answer.token_ids, answer.logprobs, strict=True):
            assert logprob == pytest.approx(row[token].item(), abs=NEAR)
            assert row[token] > row.max() - NEAR


def test_prompt_logprobs_are_those_of_transformers_cached_or_not(served: Replica) -> None:
    [prompt] = prompts([100], seed=3)
    tokens(served, prompt)
    [choice] = ask(served, prompt, prompt_logprobs=3)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    expected = logits("llama3", prompt)[:-1].log_softmax(-1)
    for token, row, found in zip(prompt[1:], expected, others, strict=True):
        best = row.topk(3)
        assert set(found) == {str(token), *map(str, best.indices.tolist())}
        for other, entry in found.items():
            assert entry["logprob"] == pytest.approx(row[int(other)].item(), abs=EXACT)
            assert entry["rank"] == 1 + int((row > row[int(other)]).sum())


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_continuation_is_scored_as_lm_eval_asks_for_it(served: Replica, max_tokens: int) -> None:
    """Its client: token ids, echo, logprobs=1, max_tokens=1; it leaves out the last token, which was generated."""
    asked = prompts([40, 7, 90], seed=5)
    context_tokens = 5
    answer = ask(served, asked, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
    for prompt, choice in zip(asked, answer["choices"], strict=True):
        expected = logits("llama3", prompt)[:-1].log_softmax(-1)
        until = len(prompt) if max_tokens == 0 else -1
        found = choice["logprobs"]["token_logprobs"][context_tokens:until]
        top = choice["logprobs"]["top_logprobs"][context_tokens:until]
        of_tokens = [row[token].item() for row, token in zip(expected, prompt[1:], strict=True)][context_tokens - 1 :]
        assert found == pytest.approx(of_tokens, abs=EXACT)
        is_greedy = all(logprob == max(one.values()) for logprob, one in zip(found, top, strict=True))
        said_greedy = expected.argmax(-1).tolist()[context_tokens - 1 :] == prompt[context_tokens:]
        assert is_greedy == said_greedy
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens


@pytest.fixture(scope="module")
def demo(demo_cache: Path) -> Iterator[Replica]:
    with native("demo", "--kv-cache-gb", 0.1, WARMROUTE_CACHE_DIR=str(demo_cache)) as running:
        yield running


@pytest.fixture
async def http(demo: Replica) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=demo.url, timeout=DEADLINE_S) as client:
        yield client


async def test_a_chat_with_the_demo_is_that_of_transformers(http: httpx2.AsyncClient, demo_cache: Path) -> None:
    messages = [{"role": "user", "content": "What is a prefix cache?"}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    streamed = await http.post("/v1/chat/completions", json=body | {"stream": True})
    [folder] = demo_cache.iterdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert answer["prompt_token_ids"] == prompt
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    [choice] = answer["choices"]
    assert choice["token_ids"] == generated
    assert choice["message"]["content"] == tokenizer.decode(generated, skip_special_tokens=True)
    assert choice["finish_reason"] == ("length" if len(generated) == 40 else "stop")
    assert content(streamed.text) == choice["message"]["content"]


def content(events: str) -> str:
    """The text of a streamed chat."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


# ---- caching never changes output

SHARED = prompts([75], seed=5)[0]
FORKS = [SHARED, [*SHARED[:37], 5, 6, 7], [*SHARED, 8, 9], [*SHARED[:70], 1], SHARED[:64], SHARED, *prompts([9, 50])]
SETTINGS: dict[str, tuple[str, ...]] = {
    "off": ("--no-enable-prefix-caching",),
    "whole blocks": ("--set=partial_reuse=false",),
    "partial": (),
}


def choices(served: Replica, asked: Sequence[list[int]], **fields: Any) -> list[Any]:
    """The choices of all prompts at once, so that they run in one batch; without their numbers."""
    answered = ask(served, asked, logprobs=5, **fields)["choices"]
    return [{**choice, "index": 0} for choice in answered]


def cached_tokens(served: Replica, prompt: list[int], **fields: Any) -> int:
    """Cached tokens of the prompt, in whole blocks and in parts."""
    found: int = ask(served, prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1, "seed": 7, "repetition_penalty": 1.3}], ids=["greedy", "seeded"]
)
def test_no_number_depends_on_the_cache(serving: Serving, fields: dict[str, Any]) -> None:
    salts = [{"cache_salt": f"{name} {sorted(fields)}"} for name in ("one", "other")]
    off = serving("llama3", *SETTINGS["off"])
    expected = [choices(off, [prompt], **fields)[0] for prompt in FORKS]  # each alone
    for options in SETTINGS.values():
        served = serving("llama3", *options)
        for salt in ({}, {}, salts[0], salts[1], salts[0]):  # cold and warm
            assert choices(served, FORKS, **fields, **salt) == expected
        assert [choices(served, [prompt], **fields)[0] for prompt in FORKS] == expected


@pytest.mark.parametrize(("setting", "found"), [("off", (0, 0)), ("whole blocks", (64, 32)), ("partial", (74, 37))])
def test_as_much_is_cached_as_the_settings_say(serving: Serving, setting: str, found: tuple[int, int]) -> None:
    served, salt = serving("llama3", *SETTINGS[setting]), {"cache_salt": "as much"}
    ask(served, SHARED, **salt)
    assert (cached_tokens(served, SHARED, **salt), cached_tokens(served, FORKS[1], **salt)) == found


def test_another_salt_never_hits(served: Replica) -> None:
    [prompt] = prompts([75], seed=6)
    assert cached_tokens(served, prompt, cache_salt="of mine") == 0
    assert cached_tokens(served, prompt, cache_salt="of mine") == len(prompt) - 1
    others: list[dict[str, str]] = [{}, {"cache_salt": "of mine "}, {"cache_salt": "OF MINE"}, {"cache_salt": "of"}]
    assert [cached_tokens(served, prompt, **other) for other in others] == [0] * len(others)
    fork = [*prompt[:37], 1, 2, 3]  # would hit whole blocks and a part
    assert [cached_tokens(served, fork, cache_salt=f"fork {number}") for number in range(3)] == [0] * 3


# ---- what sampling parameters do

[PROMPT] = prompts([20], seed=8)
LETTERS = {str(byte): 50 for byte in b"abcdefghijklmnopqrstuvwxyz"}
ALL = 100


def test_a_seed_repeats_and_others_do_not(served: Replica) -> None:
    drawn = [tokens(served, PROMPT, temperature=1, seed=seed) for seed in (5, 5, 6, None, None)]
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn))) == 4


def test_choices_differ_unless_they_are_greedy(served: Replica) -> None:
    for temperature, distinct in ((1, 4), (0, 1)):
        drawn = ask(served, PROMPT, temperature=temperature, seed=5, n=4)["choices"]
        assert len({tuple(choice["token_ids"]) for choice in drawn}) == distinct


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1}, {"temperature": 1e-9}], ids=str)
def test_the_narrowest_sampling_is_greedy(served: Replica, narrow: dict[str, Any]) -> None:
    greedy = tokens(served, PROMPT)
    assert tokens(served, PROMPT, **{"temperature": 1.5, "seed": 3} | narrow) == greedy
    assert tokens(served, PROMPT, temperature=1.5, seed=3) != greedy


def test_a_bias_forces_and_forbids(served: Replica) -> None:
    assert tokens(served, PROMPT, logit_bias={"7": ALL}) == [7] * ANSWER
    first = tokens(served, PROMPT)[0]
    assert first not in tokens(served, PROMPT, logit_bias={str(first): -ALL}, max_tokens=60)


def test_penalties_make_the_text_less_alike(served: Replica) -> None:
    plain, *others = (
        Counter(tokens(served, PROMPT, max_tokens=200, **penalty))
        for penalty in ({}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2})
    )
    assert all(len(other) > len(plain) for other in others)
    assert max(others[1].values()) < max(plain.values())


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_string_ends_the_text(served: Replica, shown: bool) -> None:
    [free] = ask(served, PROMPT, logit_bias=LETTERS)["choices"]
    stop = free["text"][5:7]
    end = free["text"].index(stop)
    [stopped] = ask(served, PROMPT, logit_bias=LETTERS, stop=["?", stop], include_stop_str_in_output=shown)["choices"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["text"] == free["text"][: end + len(stop) * shown]
    assert stopped["token_ids"] == free["token_ids"][: end + len(stop)]


def test_a_stop_token_ends_the_text(served: Replica) -> None:
    free = tokens(served, PROMPT)
    stop = free[6]
    [stopped] = ask(served, PROMPT, stop_token_ids=[stop])["choices"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["token_ids"] == free[: free.index(stop) + 1]


def test_so_many_tokens_come_before_a_stop(served: Replica) -> None:
    forced = {"stop_token_ids": [7], "logit_bias": {"7": ALL}}
    assert tokens(served, PROMPT, **forced) == [7]
    after_five = tokens(served, PROMPT, **forced, min_tokens=5)
    assert after_five.index(7) == len(after_five) - 1 == 5


def test_the_models_end_of_sequence_ends_the_text_unless_it_is_ignored(served: Replica) -> None:
    forced = {"logit_bias": {"2": ALL}}
    assert tokens(served, PROMPT, **forced, ignore_eos=False) == [2]
    assert tokens(served, PROMPT, **forced, ignore_eos=True) == [2] * ANSWER
    of_the_bytes = BYTES.eos_token_ids[0]  # which a model without a tokenizer does not know
    assert tokens(served, PROMPT, logit_bias={str(of_the_bytes): ALL}, ignore_eos=False) == [of_the_bytes] * ANSWER


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, VOCABULARY]}, "prompt"),
        ({"prompt": [[1], [2**32 - 1]]}, "prompt[1]"),
        ({"prompt_token_ids": [[VOCABULARY]]}, "prompt_token_ids[0]"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ({"max_tokens": LENGTH}, "max_tokens"),
    ],
    ids=str,
)
def test_what_the_model_cannot_take_is_refused(served: Replica, fields: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/completions", completion([1, 2]) | fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert tokens(served, PROMPT)  # nothing has happened


def test_a_bias_and_a_stop_at_the_last_token_are_taken(served: Replica) -> None:
    last = VOCABULARY - 1
    assert tokens(served, [last], logit_bias={str(last): ALL}, stop_token_ids=[last]) == [last]


def changed(folder: Path, to: Path, **fields: Any) -> Path:
    """The folder's model under a config.json with other fields."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").unlink()
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


def assert_refused(status: int, words: str, *options: object) -> None:
    """The first error says it, in one line."""
    ended, said = refused("--model", *options)
    errors = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert (ended, "Traceback" in said) == (status, False), said
    assert words in errors[0], said


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("llama", {"architectures": ["GemmaForCausalLM"]}, '"GemmaForCausalLM" is not supported; what works: Llama'),
        ("mistral", {"sliding_window": 64}, "sliding_window is 64; that is less than the 512 positions"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, 'quantized ("awq"), which is not supported; use'),
    ],
)
def test_a_model_that_is_not_built_is_refused(
    folder: Path, tmp_path: Path, name: str, fields: dict[str, Any], words: str
) -> None:
    assert_refused(2, words, changed(saved(name, folder), tmp_path / "changed", **fields))


@pytest.mark.chaos
def test_files_that_are_not_there_are_named(folder: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    lacking = changed(saved("llama", folder), tmp_path / "lacking")
    (lacking / "model.safetensors").unlink()
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(1, "model-00001-of-00002.safetensors is missing", lacking)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert_refused(2, "model.gguf (4 bytes) is not a whole GGUF file", gguf)
    (lacking / "model.safetensors.index.json").unlink()
    (lacking / "model.gguf").write_bytes(b"GGUF")
    assert_refused(1, "model.gguf (4 bytes) is not a whole GGUF file", lacking)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "int8"), "'int8' is not one of 'auto', 'float32'"),
        (("--attention", "flash"), "'flash' is not one of 'auto', 'cpu'"),
        (("--max-model-len", LENGTH + 1), f"give {LENGTH} or less"),
    ],
    ids=str,
)
def test_settings_that_do_not_exist_are_refused(folder: Path, options: tuple[object, ...], words: str) -> None:
    assert_refused(2, words, saved("qwen3", folder), *options)


def test_more_blocks_than_memory_are_refused(folder: Path) -> None:
    assert_refused(1, "lower --kv-cache-gb or --num-blocks", saved("qwen3", folder), "--num-blocks", 10**9)
