"""Requests become the token ids that transformers makes of them, and token ids become its text.

The folders are written in all the spellings that models are published in.
"""

import json
from collections.abc import Callable, Sequence
from datetime import date
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from api.errors import ApiError
from api.openai.requests import ChatRequest, CompletionRequest, read
from api.prompts.prompts import Prompts
from api.tokens.detokenize import Detokenizer
from api.tokens.tokenizer import HfTokenizer
from tests.api.bodies import JSON
from tests.api.chat_templates import OTHER, TEMPLATES
from tests.api.tokenizers import BYTE_TOKENS, TEXTS
from tests.api.trained import FAMILIES
from tests.late import transformers

ENDS = {
    "gpt2": ("<|endoftext|>", "<|endoftext|>"),
    "qwen": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
}
TOOL_TEMPLATE = "{{ tools | tojson }}" + OTHER
Spelling = Callable[[str, str, Path], None]


# ---- folders


def special_tokens(family: str) -> dict[str, str]:
    bos, eos = ENDS.get(family, ("<s>", "</s>"))
    named = {"bos_token": bos, "eos_token": eos, "unk_token": None if family in ENDS else "<unk>"}
    return {name: token for name, token in named.items() if token is not None}


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def config(**fields: Any) -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **fields}


def with_a_template_file(family: str, template: str, folder: Path) -> None:
    FAMILIES[family]().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write(folder, tokenizer_config=config(**special_tokens(family), chat_template="not this one"))


def with_all_in_the_config(family: str, template: str, folder: Path) -> None:
    """The old spelling: tokens are objects, and the added ones are listed once more."""
    tokenizer = FAMILIES[family]()
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    named = {name: {"content": token, **flags} for name, token in special_tokens(family).items()}
    objects = {name: {"__type": "AddedToken", **token} for name, token in named.items()}
    added = {
        str(i): {"content": token.content, **flags, "special": token.special}
        for i, token in tokenizer.get_added_tokens_decoder().items()
    }
    write(folder, special_tokens_map={**named, "sep_token": "</sep>"})  # not read where the config lists the tokens
    write(folder, tokenizer_config=config(**objects, added_tokens_decoder=added, chat_template=template))


def with_a_map(family: str, template: str, folder: Path) -> None:
    """The map has the last word where the configuration lists no added tokens."""
    FAMILIES[family]().save(str(folder / "tokenizer.json"))
    named = special_tokens(family)
    write(folder, special_tokens_map=named | {"eos_token": {"content": named["eos_token"], "lstrip": False}})
    write(folder, tokenizer_config=config(eos_token="<|other|>", chat_template=template))


def with_named_templates(family: str, template: str, folder: Path) -> None:
    FAMILIES[family]().save(str(folder / "tokenizer.json"))
    templates = [{"name": "default", "template": template}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    write(folder, tokenizer_config=config(**special_tokens(family), chat_template=templates))


def with_new_tokens(family: str, template: str, folder: Path) -> None:
    """The configuration names special tokens that tokenizer.json does not have, or has as plain words."""
    FAMILIES[family]().save(str(folder / "tokenizer.json"))
    new = {"pad_token": "<|pad|>", "mask_token": "the", "image_token": "<|image|>"}
    named = special_tokens(family) | new
    write(folder, tokenizer_config=config(**named, additional_special_tokens=["<x>"], chat_template=template))


def saved_by_transformers(family: str, template: str, folder: Path, **how: Any) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=FAMILIES[family](), **special_tokens(family))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder, **how)


def saved_without_jinja_files(family: str, template: str, folder: Path) -> None:
    saved_by_transformers(family, template, folder, save_jinja_files=False)


def saved_with_more_templates(family: str, template: str, folder: Path) -> None:
    saved_by_transformers(family, {"default": template, "tool_use": TOOL_TEMPLATE}, folder)  # type: ignore[arg-type]


SPELLINGS: tuple[Spelling, ...] = (
    with_a_template_file,
    with_all_in_the_config,
    with_a_map,
    with_named_templates,
    with_new_tokens,
    saved_by_transformers,
    saved_without_jinja_files,
    saved_with_more_templates,
)


class Model:
    """A folder, loaded by us and by transformers."""

    def __init__(self, family: str, style: str, spelling: Spelling, folder: Path) -> None:
        spelling(family, TEMPLATES[style], folder)
        self.tokenizer = HfTokenizer(folder)
        self.prompts = Prompts(self.tokenizer)
        self.theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, Spelling], Model]:
    @cache
    def loaded(family: str, style: str, spelling: Spelling) -> Model:
        return Model(family, style, spelling, tmp_path_factory.mktemp(family))

    return loaded


# ---- what clients send


FRAGMENTS = [
    *("<|im_end|>", "<|im_start|>system\n", "<|eot_id|>", "<|begin_of_text|>", "<s>", "</s>", "[INST]", "[/INST] "),
    *("<unk>", "<0x0A>", "▁", "<tool_call>", "</think>", "<think>\n", "<|endoftext|>", "<|image|>", "<x>", "the"),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u200b", "\ufeff", "\x00", "\x1f", "\x85", "\u2028"),
    *("\u0301", "e\u0301", "é", "👩‍👩‍👧", "🏳️‍🌈", "\u200d", "\U0001d4b3", "ﬁ", "Å", "가", "ㄱ", "\U0010ffff", "\ufffd"),
    *("{{ 7 * 7 }}", "{% raw %}", '"', "\\", "<tool_response>", "END_OF", "12345678", "you're "),
]
TEXT = st.one_of(
    st.text(max_size=12),
    st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from(TEXTS) | st.text(max_size=4), max_size=6).map("".join),
)
NAME = st.sampled_from(["look", "add", "größe", "f"])
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "number"])}, optional={"description": TEXT}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAME, inner, max_size=2)},
        optional={"required": st.lists(NAME, max_size=2), "additionalProperties": st.booleans()},
    ),
    max_leaves=3,
)
FUNCTION = st.fixed_dictionaries(
    {"name": NAME}, optional={"description": TEXT, "parameters": SCHEMAS, "strict": st.booleans()}
)
EXTRA = st.fixed_dictionaries({}, optional={"cache": st.none(), "strict": st.booleans()})
TOOL = st.tuples(EXTRA, st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})).map(
    lambda given: given[0] | given[1]
)
CALL_ID = st.sampled_from(["abcDEF123", "call_1"])


def message(role: str, content: st.SearchStrategy[Any] = TEXT, **more: st.SearchStrategy[Any]) -> Any:
    return st.fixed_dictionaries({"role": st.just(role), "content": content, **more})


def calls(arguments: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    function = st.builds(lambda name, given: {"name": name, "arguments": given}, NAME, arguments)
    call = st.builds(lambda i, called: {"id": i, "type": "function", "function": called}, CALL_ID, function)
    return st.lists(call, min_size=1, max_size=2)


USER = message("user") | message("user", name=TEXT)
ANSWER = message("assistant") | message("assistant", reasoning_content=TEXT)
CALLING = message("assistant", TEXT | st.none() | st.just(""), tool_calls=calls(OBJECTS))
RESULT = message("tool", tool_call_id=CALL_ID)
TURN = st.one_of(
    st.tuples(USER, ANSWER), st.tuples(USER, CALLING, RESULT, ANSWER), st.tuples(USER, CALLING, RESULT, RESULT, ANSWER)
).map(list)
ORDERLY = st.builds(
    lambda system, turns, last: [*system, *(one for turn in turns for one in turn), *last],
    st.lists(message("system"), max_size=1),
    st.lists(TURN, max_size=2),
    st.one_of(st.tuples(USER), st.tuples(USER, ANSWER), st.tuples(USER, CALLING), st.tuples(USER, CALLING, RESULT)),
)
UNRULY = st.lists(st.one_of(message("system"), USER, ANSWER, CALLING, RESULT), min_size=1, max_size=5)
KWARGS = st.fixed_dictionaries(
    {},
    optional={
        "enable_thinking": st.booleans(),
        "tools_in_user_message": st.booleans(),
        "date_string": TEXT,
        "default_system": st.booleans(),
        "notes": JSON,
    },
)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """Fields for `apply_chat_template`."""
    continued = draw(st.sampled_from([False, False, True]))
    return {
        "conversation": draw(ORDERLY | UNRULY),
        "tools": draw(st.none() | st.lists(TOOL, min_size=1, max_size=2)),
        "continue_final_message": continued,
        "add_generation_prompt": not continued and draw(st.booleans()),
        **draw(KWARGS),
    }


def as_request(fields: dict[str, Any]) -> ChatRequest:
    kwargs = dict(fields)
    body = {name: kwargs.pop(name) for name in ("tools", "continue_final_message", "add_generation_prompt")}
    messages = json.loads(json.dumps(kwargs.pop("conversation")))
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body |= {"model": "m", "messages": messages, "chat_template_kwargs": kwargs}
    return read(json.dumps(body).encode(), ChatRequest)


def ours(prompts: Prompts, fields: dict[str, Any]) -> list[int] | None:
    try:
        return prompts.chat(as_request(fields))
    except ApiError:
        return None


def theirs(tokenizer: Any, fields: dict[str, Any]) -> list[int] | None:
    """None where it refuses; and for no tokens at all, which we refuse."""
    try:
        return tokenizer.apply_chat_template(**fields, tokenize=True)["input_ids"] or None
    except (jinja2.TemplateError, ValueError, TypeError):
        return None


@given(
    style=st.sampled_from([*TEMPLATES]),
    family=st.sampled_from([*FAMILIES]),
    spelling=st.sampled_from(SPELLINGS),
    fields=conversations(),
)
def test_a_conversation_becomes_the_tokens_of_transformers(
    model: Callable[[str, str, Spelling], Model],
    style: str,
    family: str,
    spelling: Spelling,
    fields: dict[str, Any],
) -> None:
    chosen = model(family, style, spelling)
    today = None
    while today != date.today():  # some templates show it
        today = date.today()
        expected, found = theirs(chosen.theirs, fields), ours(chosen.prompts, fields)
    event(f"{style}: refused" if expected is None else f"{style}: shown")
    assert found == expected


@given(
    family=st.sampled_from([*FAMILIES]),
    spelling=st.sampled_from(SPELLINGS),
    prompt=TEXT,
    add_special_tokens=st.booleans(),
)
def test_a_prompt_becomes_the_tokens_of_transformers(
    model: Callable[[str, str, Spelling], Model], family: str, spelling: Spelling, prompt: str, add_special_tokens: bool
) -> None:
    chosen = model(family, "other", spelling)
    expected = chosen.theirs(prompt, add_special_tokens=add_special_tokens).input_ids
    body = {"model": "m", "prompt": prompt, "add_special_tokens": add_special_tokens}
    try:
        found = chosen.prompts.completion(read(json.dumps(body).encode(), CompletionRequest))[0]
    except ApiError:
        found = []
    assert found == expected
    assert chosen.tokenizer.special_tokens == chosen.theirs.special_tokens_map


# ---- tokens to text


def streamed(tokenizer: HfTokenizer, pieces: Sequence[Sequence[int]], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip)
    return "".join(map(detokenizer.feed, pieces)) + detokenizer.finish()


def tokens_of(chosen: Model, token_ids: list[int], skip: bool) -> list[str]:
    shown = [i for i in token_ids if not skip or i not in chosen.tokenizer.special_token_ids]
    return [token for token in chosen.theirs.convert_ids_to_tokens(shown) if token is not None]


def by_runs(tokens: list[str], errors: str) -> str:
    """A SentencePiece text: each run of byte tokens is decoded, and the others are joined."""
    text = ""
    for is_bytes, run in groupby(tokens, key=BYTE_TOKENS.__contains__):
        if is_bytes:
            text += bytes(map(BYTE_TOKENS.__getitem__, run)).decode(errors=errors)
        else:
            text += "".join(run).replace("▁", " ")
    return text


def check_stream(chosen: Model, family: str, token_ids: list[int], cuts: set[int], skip: bool) -> None:
    """However it is cut, a stream is what transformers decodes at once, but for two things where it has SentencePiece.

    A stream continues a prompt, so a space at the beginning stays. And a run of byte tokens that is not UTF-8 becomes
    as many replacement characters there as it has bytes, its good characters included, which a stream has shown by
    then: here it is what any decoder of UTF-8 makes of it.
    """
    bounds = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    pieces = [token_ids[start:end] for start, end in pairwise(bounds)]
    whole = streamed(chosen.tokenizer, [token_ids], skip)
    assert streamed(chosen.tokenizer, [[i] for i in token_ids], skip) == whole
    assert streamed(chosen.tokenizer, pieces, skip) == whole
    decoded = chosen.theirs.decode(token_ids, skip_special_tokens=skip)
    assert decoded == chosen.tokenizer.decode(token_ids, skip_special_tokens=skip)
    if family in ENDS:
        assert decoded == whole
        return
    tokens = tokens_of(chosen, token_ids, skip)
    assert whole == by_runs(tokens, "replace")
    try:
        valid = by_runs(tokens, "strict")
    except UnicodeDecodeError:
        event("broken bytes")
        assert "\ufffd" in decoded and "\ufffd" in whole
    else:
        assert decoded == valid.removeprefix(" ")


CUTS = st.sets(st.integers(1, 60), max_size=8)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXT, spelling=st.sampled_from(SPELLINGS), cuts=CUTS, skip=st.booleans(), bos=st.booleans())
def test_a_text_is_streamed_as_transformers_decodes_it(
    model: Callable[[str, str, Spelling], Model],
    family: str,
    text: str,
    spelling: Spelling,
    cuts: set[int],
    skip: bool,
    bos: bool,
) -> None:
    chosen = model(family, "other", spelling)
    check_stream(chosen, family, chosen.tokenizer.encode(text, add_special_tokens=bos), cuts, skip)


@pytest.mark.parametrize("family", FAMILIES)
@given(token_ids=st.lists(st.integers(0, 600), max_size=40), cuts=CUTS, skip=st.booleans(), data=st.data())
def test_random_tokens_are_streamed_as_transformers_decodes_them(
    model: Callable[[str, str, Spelling], Model],
    family: str,
    token_ids: list[int],
    cuts: set[int],
    skip: bool,
    data: st.DataObject,
) -> None:
    chosen = model(family, "other", data.draw(st.sampled_from(SPELLINGS)))
    check_stream(chosen, family, token_ids, cuts, skip)
