"""A client's view of streams with any breaks, against the unbroken stream."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.native import pack_ids
from api.tokens.detokenize import Detokenizer
from api.tokens.tokenizer import ByteTokenizer
from engines import NATIVE, PROFILES
from router.prompts.prompt import Peek, Prompt
from router.proxy.streams.continuation import Continuation

PROMPT = [104, 105]
LAST = b"data: [DONE]\n\n"
TOKENIZER = ByteTokenizer()
TEXTS = st.one_of(st.text(min_size=1, max_size=12).map(str.encode), st.binary(min_size=1, max_size=12))


def sent(id: str, chat: bool, choices: list[Any], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if chat else "text_completion"
    fields = {"id": id, "object": kind, "created": 1, "model": "m", "choices": choices, **more}
    return b"data: %b\n\n" % json.dumps(fields).encode()


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def engine(id: str, ids: Sequence[int], start: int, chat: bool, steps: Sequence[int], native: bool) -> Iterator[Any]:
    """Events of a stream with these tokens, each with its ids, from where another one was cut."""
    reader = Detokenizer(TOKENIZER)
    reader.feed(ids[:start] if native else [])
    if chat and not (native and start):
        delta = {"role": "assistant", "content": ""}
        yield sent(id, chat, [{"index": 0, "delta": delta, "finish_reason": None}], prompt_token_ids=PROMPT), ()
    place, taken = start, 0
    while place < len(ids):
        some = ids[place : place + steps[taken % len(steps)]]
        place, taken = place + len(some), taken + 1
        last = place == len(ids)
        text = reader.feed(some) + (reader.finish() if last else "")
        said = {"delta": {"content": text}} if chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": "length" if last else None}
        yield sent(id, chat, [choice if native else {**choice, "token_ids": some}]), some
    before = 0 if native else start
    used = sent(id, chat, [], usage=usage(len(PROMPT) + before, len(ids) - before))
    yield from ((used + LAST, ()),) if native else ((used, ()), (LAST, ()))


def told(stream: bytes) -> tuple[str, list[str], list[str], list[Any]]:
    """All text; the roles, ends and usages."""
    assert stream.endswith(b"data: [DONE]\n\n") and stream.count(b"[DONE]") == 1
    chunks = [json.loads(part[6:]) for part in stream.split(b"\n\n")[:-2]]
    assert len({(chunk["id"], chunk["object"], chunk["created"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert b"token_ids" not in stream
    said = [choice["delta"] if "delta" in choice else {"content": choice["text"]} for choice in choices]
    text = "".join(delta.get("content") or "" for delta in said)
    roles = [delta["role"] for delta in said if delta.get("role")]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return text, roles, ends, [chunk["usage"] for chunk in chunks if chunk.get("usage")]


@given(
    text=TEXTS,
    chat=st.booleans(),
    losses=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 30), st.booleans()), max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    reads=st.lists(st.integers(1, 300), min_size=1, max_size=3),
)
def test_a_stream_that_breaks_anywhere_is_read_as_if_it_had_not(
    text: bytes, chat: bool, losses: list[tuple[int, int, bool]], steps: list[int], reads: list[int]
) -> None:
    ids = list(text)
    prompt = Prompt("m", 2, [pack_ids(PROMPT)], True, None, 1, None, None, Peek("m"))
    body = {"model": "m", "max_tokens": len(ids), "stream_options": {"include_usage": True}}
    raw = json.dumps(body).encode()
    stream = Continuation(chat, prompt, raw, TOKENIZER)
    shown = b""
    for attempt, (events, extra, native) in enumerate([*losses, (99, 0, False)]):
        native = native and attempt > 0
        if not stream.fits(NATIVE if native else PROFILES["vllm"], None):
            assert not native
            with pytest.raises(UnicodeDecodeError):
                text.decode()
            return  # only ours can go on within bytes that are no text
        start = len(stream.ids)
        if native:
            stream.relay(native=True)
        elif start:
            resumed = json.loads(stream.resume(raw, None))
            assert resumed["prompt"] == PROMPT + ids[:start] and resumed["max_tokens"] == len(ids) - start
        else:
            stream.relay()
        head = stream.head
        id = f"c-{attempt}" if head is None or not native else head[0]
        kind = chat if native or not start else False
        said = list(engine(id, ids, start, kind, steps, native))
        came = b"".join(event for event, _ in said[:events])
        framed = [token for _, some in said[:events] for token in some]
        if not native and events < len(said):
            came += said[events][0][:extra].rstrip(b"\n")
        shown += show(stream, came, reads)
        if stream.done:
            break
        if head is None and native and shown:
            stream.begun_by_ours((id, 1, "m"))
        stream.settle(framed if native else None)
        assert stream.why_not is None
        if stream.head is not None and stream.is_complete(None):
            shown += stream.ending()
            break
    whole = b"".join(event for event, _ in engine("c", ids, 0, chat, [1], True))
    assert told(shown) == told(whole.replace(b', "prompt_token_ids": [104, 105]', b""))


def show(stream: Continuation, came: bytes, reads: Sequence[int]) -> bytes:
    shown, place, taken = b"", 0, 0
    while place < len(came):
        size = reads[taken % len(reads)]
        shown += stream.read(came[place : place + size], False)[0]
        place, taken = place + size, taken + 1
    return shown
