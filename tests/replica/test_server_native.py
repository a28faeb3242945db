"""Real models behind real HTTP equal transformers, cached or not, and refuse unsupported requests.

Tolerances: in float32 the greedy tokens are equal and log probabilities differ by less than 1e-4; in bfloat16 by less
than 0.15, and a token is at most that much less likely than the likeliest.
"""

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from api.tokens.tokenizer import ByteTokenizer
from tests.events.processes import DEADLINE_S
from tests.late import openai, transformers
from tests.replica.models import LENGTH, VOCABULARY, logits, saved
from tests.replica.natives import Serving, ask, completion, failed, natives, tokens
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

    def __init__(self, answers: Sequence["openai.types.Completion"]) -> None:
        choices = [choice.model_dump() for answer in answers for choice in answer.choices]
        self.token_ids: list[int] = [token for choice in choices for token in choice["token_ids"]]
        self.logprobs: list[float] = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        self.top: list[dict[str, float]] = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
        self.finish_reason: str = choices[-1]["finish_reason"]


async def told(client: "openai.AsyncOpenAI", prompt: list[int], *, stream: bool, logprobs: int) -> Told:
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
    async with openai.AsyncOpenAI(base_url=f"{serving(name).url}/v1", api_key="none", max_retries=0) as client:
        pairs = zip(asked, alternatives, strict=True)
        crowd = await asyncio.gather(*(told(client, one, stream=stream, logprobs=top) for one, top in pairs))
    for prompt, answer, top in zip(asked, crowd, alternatives, strict=True):
        assert_is_transformers(name, prompt, answer, top)


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


@pytest.fixture
async def http(origin: Replica) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=origin.url, timeout=DEADLINE_S) as client:
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


# ---- what is said, and what is refused

[PROMPT] = prompts([20], seed=8)
ALL = 100


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


def assert_says(ended: tuple[int, str], status: int, words: str) -> None:
    """The first error says it, in one line."""
    found, said = ended
    errors = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert (found, "Traceback" in said) == (status, False), said
    assert words in errors[0], said


@pytest.mark.chaos
def test_files_that_are_not_there_are_named(folder: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    lacking = tmp_path / "lacking"
    shutil.copytree(saved("llama", folder), lacking)
    (lacking / "model.safetensors").unlink()
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_says(failed("--model", lacking), 1, "model-00001-of-00002.safetensors is missing")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert_says(failed("--model", gguf), 2, "model.gguf (4 bytes) is not a whole GGUF file")
    (lacking / "model.safetensors.index.json").unlink()
    (lacking / "model.gguf").write_bytes(b"GGUF")
    assert_says(failed("--model", lacking), 1, "model.gguf (4 bytes) is not a whole GGUF file")
