import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.openai.requests import ChatRequest, CompletionRequest, read
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer, HfTokenizer
from events.blocks import block_keys, pack_tokens, root_key
from router.prompts.prompt import Prompt, read_peek
from router.prompts.tokens import QUICK_BODY_BYTES, Tokens
from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import TEXTS
from tests.api.trained import FAMILIES
from tests.router.families import prompts

USER = {"role": "user", "content": "Say <|im_end|> twice, you're 12345!"}
TURNS = [USER, {"role": "assistant", "content": "…"}, {"role": "user", "content": "And [/INST]  again?\n"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def qwen(folder: Path) -> Prompts:
    return prompts("qwen", folder)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m"} | fields).encode()


def prompt(tokens: Tokens, **fields: Any) -> Prompt:
    sent = body(**fields)
    return tokens.draft("chat" if "messages" in fields else "completions", sent, read_peek(sent)).finish()


def of_replica(prompts: Prompts, **fields: Any) -> list[bytes] | str:
    """A replica's result for the request: token ids, or the message of its refusal."""
    try:
        if "messages" in fields:
            return [pack_tokens(prompts.chat(read(body(**fields), ChatRequest)))]
        return [pack_tokens(ids) for ids in prompts.completion(read(body(**fields), CompletionRequest))]
    except ApiError as error:
        return error.message


def of_router(tokens: Tokens, **fields: Any) -> list[bytes] | str:
    try:
        return prompt(tokens, **fields).packed
    except ApiError as error:
        return error.message


# ---- exactly as the replica


CONTENT = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>\n", "[INST]", "[/INST]", "</s>", "<|eot_id|>", " ", "\n", "<|"])
    | st.sampled_from(TEXTS)
    | st.text(max_size=5),
    max_size=5,
).map("".join)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT})
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=4)},
    optional={
        "tools": st.just([TOOL]),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "add_special_tokens": st.booleans(),
        "chat_template_kwargs": st.just({"enable_thinking": False}),
        "prompt_token_ids": st.just([1, 2]),
        "n": st.integers(0, 2),
    },
)
PROMPT = CONTENT | st.lists(CONTENT, min_size=1, max_size=3) | st.just([1, 2]) | st.just([[1], [10**6]])
COMPLETION = st.fixed_dictionaries({"prompt": PROMPT}, optional={"add_special_tokens": st.booleans()})


@cache
def tokens_of(family: str, folder: Path) -> Tokens:
    return Tokens("m", prompts(family, folder))


@pytest.mark.parametrize("family", FAMILIES)
@given(asked=st.lists(CHAT | COMPLETION, min_size=1, max_size=4))
def test_a_prompt_is_what_the_replica_makes_of_it(folder: Path, family: str, asked: list[dict[str, Any]]) -> None:
    theirs = prompts(family, folder)
    tokens = tokens_of(family, folder)
    if tokens.cache is not None:
        tokens.cache.clear()
    for fields in (*asked, *asked):
        assert of_router(tokens, **fields) == of_replica(theirs, **fields)
    assert "differently" not in str(tokens.why_no_cache)


def test_bytes_are_exact_without_a_cache() -> None:
    tokens = Tokens("m", Prompts(ByteTokenizer()))
    assert tokens.cache is None and tokens.why_no_cache is not None
    for fields in ({"messages": TURNS}, {"prompt": "abc"}):
        assert of_router(tokens, **fields) == of_replica(Prompts(ByteTokenizer()), **fields)


def test_keys_are_those_of_the_replicas_blocks(qwen: Prompts) -> None:
    sent = body(messages=TURNS, n=2)
    made = Tokens("base", qwen).draft("chat", sent, read_peek(sent), "adapter", "salt").finish()
    ids = qwen.chat(read(sent, ChatRequest))
    assert made.keys(16) == block_keys(ids, 16, root_key("base", "adapter", "salt", 16))
    assert (made.tokens, made.choices, made.exact, made.why_not) == (len(ids), 2, True, None)


# ---- refusals and approximate prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [USER], "temperature": -1}, "temperature"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_what_our_types_refuse_is_refused_or_left_to_a_foreign_engine(
    qwen: Prompts, fields: dict[str, Any], param: str
) -> None:
    assert isinstance(refusal := of_replica(qwen, **fields), str)
    assert of_router(Tokens("m", qwen), **fields) == refusal
    foreign = Tokens("m", qwen, strict=False)
    made = prompt(foreign, **fields)
    assert not made.exact and made.why_not == refusal and made.packed == []
    assert made.reason == f"refused: {param}"


def test_a_prompt_longer_than_the_model_is_refused_before_it_is_encoded(qwen: Prompts) -> None:
    sent = body(prompt=[1] * 50)
    tokens = Tokens("m", qwen)
    with pytest.raises(ApiError, match="50 tokens; send at most 49") as caught:
        tokens.draft("completions", sent, read_peek(sent), max_model_len=50)
    assert caught.value.status == 400
    assert tokens.draft("completions", sent, read_peek(sent), max_model_len=51).finish().tokens == 50


def test_a_model_without_a_tokenizer_is_approximate() -> None:
    tokens = Tokens("m")
    made = prompt(tokens, messages=[USER | {"content": "x" * 1000}])
    assert not made.exact and made.why_not == tokens.why_not == "it has no tokenizer here"
    assert len(made.keys(0)) == 3 and made.tokens == 251
    assert made.reason == "model"


def test_a_model_whose_replica_has_other_tokens_becomes_approximate(
    qwen: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens("m", qwen)
    assert prompt(tokens, messages=TURNS).exact
    tokens.go_approximate("its first token is another one")
    tokens.go_approximate("its first token is another one")
    assert prompt(tokens, messages=TURNS).why_not == "its first token is another one"
    assert len(caplog.records) == 1


def test_a_foreign_engine_does_not_see_our_own_fields(qwen: Prompts) -> None:
    fields = {"messages": TURNS, "prompt_token_ids": [1, 2]}
    assert prompt(Tokens("m", qwen), **fields).packed == [pack_tokens([1, 2])]
    assert prompt(Tokens("m", qwen, strict=False), **fields).packed == of_replica(qwen, messages=TURNS)


def test_a_chat_is_not_called_exact_where_the_engines_prompts_are_not_followed(qwen: Prompts) -> None:
    foreign = Tokens("m", qwen, strict=False, engine="openai")
    assert prompt(foreign, prompt="a").doubt is None
    for fields in ({"messages": TURNS}, {"messages": TURNS, "tools": [TOOL]}):
        made = prompt(foreign, **fields)
        assert made.exact and made.reason == "unverified" and made.doubt is not None
        assert made.packed == of_replica(qwen, **fields)
    assert prompt(Tokens("m", qwen), messages=TURNS, tools=[TOOL]).doubt is None, "our own replicas get the tokens"


# ---- quick prompts


def test_a_long_text_is_quick_only_when_it_is_known(qwen: Prompts) -> None:
    tokens = Tokens("m", qwen)
    sent = body(messages=[USER | {"content": "word " * 2000}])
    assert tokens.is_quick(sent) and not tokens.is_quick(b" " * (QUICK_BODY_BYTES + 1))
    draft = tokens.draft("chat", sent, read_peek(sent))
    assert not draft.is_quick
    made = draft.finish()
    again = tokens.draft("chat", sent, read_peek(sent))
    assert again.is_quick and again.finish().packed == made.packed


# ---- the cache is checked


class AtBeginnings(HfTokenizer):
    """Marks the beginning of a text: no rule about `tokenizers` knows of it."""

    marks = True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        plain = super().encode(text, add_special_tokens=add_special_tokens)
        return [0, *plain] if self.marks else plain


def marking(qwen: Prompts) -> tuple[AtBeginnings, Prompts]:
    tokenizer = AtBeginnings(qwen.tokenizer.name)
    return tokenizer, Prompts(tokenizer, TEMPLATES["qwen"])


def test_a_cache_that_would_change_tokens_is_off_from_the_start(
    qwen: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    _, theirs = marking(qwen)
    tokens = Tokens("m", theirs)
    assert tokens.cache is None and "differently" in str(tokens.why_no_cache)
    assert len(caplog.records) == 1
    assert of_router(tokens, messages=TURNS) == of_replica(theirs, messages=TURNS)


def misled(qwen: Prompts, compare_every: int) -> tuple[Tokens, Prompts]:
    """The check at the start sees nothing; later the tokenizer differs."""
    tokenizer, theirs = marking(qwen)
    tokenizer.marks = False
    tokens = Tokens("m", theirs, compare_every=compare_every)
    assert prompt(tokens, messages=TURNS).exact  # the first one is compared
    tokenizer.marks = True
    return tokens, theirs


def answers(tokens: Tokens, count: int) -> Sequence[list[bytes] | str]:
    return [of_router(tokens, messages=[*TURNS, {"role": "assistant", "content": f"{i}"}]) for i in range(count)]


def test_a_sample_is_compared_and_turns_a_wrong_cache_off(qwen: Prompts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    tokens, theirs = misled(qwen, compare_every=10)
    found = answers(tokens, 30)
    right = [of_replica(theirs, messages=[*TURNS, {"role": "assistant", "content": f"{i}"}]) for i in range(30)]
    assert found[8:] != right[8:] and found[9:] == right[9:], "the compared piece and all after it are correct"
    assert tokens.cache is None
    assert len(caplog.records) == 1


def test_without_the_sample_the_wrong_cache_stays(qwen: Prompts) -> None:
    """The negative control."""
    tokens, theirs = misled(qwen, compare_every=10**9)
    right = [of_replica(theirs, messages=[*TURNS, {"role": "assistant", "content": f"{i}"}]) for i in range(30)]
    assert answers(tokens, 30)[29] != right[29] and tokens.cache is not None


def test_every_family_that_can_be_cut_is_cached(folder: Path) -> None:
    cached = {family for family in FAMILIES if Tokens("m", prompts(family, folder)).cache is not None}
    assert cached >= {"qwen", "llama3", "mistral"}
