"""`python -m router.prompts.reading.process PARENT_PID`: parses large bodies, one at a time, for the router.

It may take only so much memory for one; for how long is the router's to say, which ends it if need be.
"""

import gc
import os
import resource
import struct
import sys
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw

from api.errors import ApiError, invalid
from api.generation_apis import APIS
from api.http.bodies import LARGEST_BODY_BYTES
from api.openai.requests import read
from api.openai_responses.named import NamedResponses, named_in
from api.process.allocator import give_back
from api.process.lifeline import die_with_parent
from api.prompts.counting import Counted, check_counts
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import load_tokenizer
from router.prompts.pictures import cut
from router.prompts.prefixes.recent import TEXT_BYTES
from router.prompts.prompt import (
    APPROXIMATE,
    BYTES_PER_TOKEN,
    UNREADABLE,
    Peek,
    PeekMessage,
    beginning_of,
    forget_others,
    lenient,
    peek_of,
    salted,
    unreadable,
)
from router.prompts.reading.messages import (
    LENGTH,
    OUT_OF_MEMORY,
    Body,
    Found,
    FromProcess,
    Made,
    Make,
    Refused,
    Salt,
    ToProcess,
    decode_to_process,
    framed,
)
from router.prompts.tokens import Tokens

MAX_BYTES = 2 * LARGEST_BODY_BYTES  # the memory for one body: itself, all that is built of it and its prompt
MAX_FIELD_BYTES = 64 * 1024  # all fields but the contents: the router keeps them
MAX_TEXT_KEYS = 16 * 1024  # no replica is taken to hold more approximate blocks
NICENESS = 5  # the router's other clients, and replicas beside it, come first
MODELS = 4  # models whose tokenizers are kept, each with
CACHE_BYTES = 32 * 1024 * 1024  # the memory for token ids of earlier messages of long conversations

CONTENTS = frozenset(("messages", "prompt", "tools"))
_FIELDS = [(field.name, field.type) for field in msgspec.structs.fields(Peek) if field.name not in CONTENTS]
_OTHERS = [(name, type) for name, type in _FIELDS if name != "model"]


def _apart(name: str, others: list[tuple[str, Any]]) -> type[Any]:
    """A struct for a body whose contents stay raw JSON."""
    fields: list[Any] = [("model", str), ("tools", Raw, Raw(b"")), *((other, type, None) for other, type in others)]
    return msgspec.defstruct(name, fields, bases=(Counted,), kw_only=True)


_Apart = _apart("_Apart", _OTHERS)
_ApartLoosely = _apart("_ApartLoosely", [(name, Any) for name, _ in _OTHERS])
_decode_apart = msgspec.json.Decoder(_Apart).decode
_decode_messages = msgspec.json.Decoder(list[PeekMessage] | None).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_any = msgspec.json.Decoder().decode
SEVERAL_WITHIN = 64  # bytes of a list of prompts, in which the first of them begins


class _Forwarded(msgspec.Struct):
    model: Any = None
    cache_salt: Any = None


_decode_forwarded = msgspec.json.Decoder(_Forwarded).decode


class Process:
    def __init__(self, source: BinaryIO, sink: BinaryIO, most_bytes: int = MAX_BYTES) -> None:
        self._source = source
        self._sink = sink
        self._most_bytes = most_bytes
        self._tokens: dict[bytes, Tokens] = {}  # prompts by the parts that they were made of

    def run(self) -> None:
        """Serve requests until the router closes the pipe."""
        limit_memory(self._most_bytes)
        while (asked := self._receive()) is not None:
            assert isinstance(asked, Body), asked
            try:
                self._serve(asked)
            except ApiError as error:
                self._send(Refused.of(error))
            except UNREADABLE as error:  # more of it has to be read than was to find its fields
                self._send(Refused.of(unreadable(error)))
            except MemoryError:
                why = f"reading the body takes more than {self._most_bytes:,} bytes of memory; send less"
                self._send(Refused.of(ApiError(413, why, code="body_too_costly")))
            gc.collect()
            give_back()

    def _serve(self, asked: Body) -> None:
        body = self._read(asked.size)
        apart = take_apart(body) if asked.whole else None
        found = found_in(apart) if asked.whole else found_to_forward(body, names=asked.names)
        if len(msgspec.msgpack.encode(found)) > MAX_FIELD_BYTES:
            raise invalid(f"the fields beside messages, prompt and tools have more than {MAX_FIELD_BYTES:,} bytes")
        self._send(found)
        wanted = self._receive()
        if isinstance(wanted, Salt):
            before = Peek("", cache_salt="" if "cache_salt" in found.fields else None)
            self._send(Made(body=salted(body, before, wanted.salt or "")))
        elif isinstance(wanted, Make):
            made = None
            try:
                made = self._made(body, apart, found, wanted)
            except MemoryError:  # refused for our own replicas; for others the tokens are estimated
                if wanted.strict:
                    raise
            estimate = Made(tokens=len(body) // BYTES_PER_TOKEN, why_not="its body takes too much memory to read")
            self._send(made or estimate)

    def _made(self, body: bytes, apart: Any, found: Found, make: Make) -> Made:
        tokens = self._tokens_of(make)
        if make.strict and make.why_not is None:
            check_counts(apart, make.max_model_len, chat=APIS[make.api].is_chat)
        reads_text = make.with_text or make.why_not is not None or not make.strict
        peek = Peek(**found.fields, **(contents_of(apart) if reads_text else {}))
        forget_others(peek, APIS[make.api])
        if reads_text and not APIS[make.api].is_inner and (shown := peek_of(make.api, body, peek.model)) is not None:
            peek.messages = shown.messages
        prompt = tokens.draft(make.api, body, peek, make.lora, make.salt, make.max_model_len).finish()
        keys = prompt.keys(APPROXIMATE)[:MAX_TEXT_KEYS] if reads_text else None
        changed, has_salt = sent(body, peek, make)
        without = cut(make.api, changed or body) if make.cuts else None
        return Made(
            body=changed,
            salted=has_salt,
            tokens=prompt.tokens,
            packed=prompt.packed,
            exact=prompt.exact,
            why_not=prompt.why_not,
            choices=prompt.choices,
            text_keys=None if keys is None else struct.pack(f"<{len(keys)}Q", *keys),
            text_bytes=prompt.text_bytes if reads_text else 0,
            beginning=beginning_of(peek, TEXT_BYTES).decode(errors="replace") if reads_text else "",
            shape=prompt.shape,
            doubt=prompt.doubt,
            retain=prompt.retain,
            dated_s=prompt.dated_s,
            further_tokens=prompt.all_tokens - prompt.tokens,
            cut=without if without is not None and without.pictures else None,
            reason=prompt.reason,
        )

    def _tokens_of(self, make: Make) -> Tokens:
        """The model's `Tokens`, set up as in the router."""
        made_of = make.model, make.tokenizer, make.template, make.vocab_size, make.strict
        key = msgspec.msgpack.encode((*made_of, make.engine))
        tokens = self._tokens.get(key)
        if tokens is None:
            if len(self._tokens) >= MODELS:
                self._tokens.clear()
            limit_memory(None)
            prompts = None
            if make.tokenizer is not None:
                tokenizer, name = load_tokenizer(make.tokenizer or None), make.template_name
                prompts = Prompts(tokenizer, make.template, make.vocab_size, name)
            tokens = self._tokens[key] = Tokens(
                make.model, prompts, cache_bytes=CACHE_BYTES, strict=make.strict, engine=make.engine
            )
            tokens.shapes = None  # the router knows which are verified
            limit_memory(self._most_bytes + CACHE_BYTES)
        tokens.why_not = make.why_not
        return tokens

    # ---- the pipe

    def _receive(self) -> ToProcess | None:
        head = self._source.read(LENGTH.size)
        return decode_to_process(self._read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None

    def _read(self, size: int) -> bytes:
        try:
            received = self._source.read(size)
        except MemoryError:
            # The rest in the pipe is a client's: read on, it would be taken for the router's messages.
            raise SystemExit(OUT_OF_MEMORY) from None
        if len(received) < size:
            raise SystemExit  # the router has ended
        return received

    def _send(self, message: FromProcess) -> None:
        self._sink.write(framed(message))
        self._sink.flush()


# ---- a body as read


def take_apart(body: bytes) -> Any:
    """Split a body into raw fields; raise ApiError 400 unless it is a JSON object with a model."""
    try:
        return _decode_apart(body)
    except UNREADABLE:
        apart: Any = read(body, _ApartLoosely)
        for name, type in _OTHERS:
            value = getattr(apart, name)
            if value is not None:
                setattr(apart, name, lenient(value, type))
        return apart


def found_in(apart: Any) -> Found:
    fields = {name: value for name, _ in _FIELDS if (value := getattr(apart, name)) is not None}
    return Found(fields, chat=bytes(apart.messages) not in (b"", b"null"))


def contents_of(apart: Any) -> dict[str, Any]:
    """The contents of a Peek; of several prompts only the first is parsed, the others stay as they are written."""
    try:
        messages = _decode_messages(apart.messages)
    except UNREADABLE:
        messages = None
    try:
        several = bytes(memoryview(apart.prompt)[:SEVERAL_WITHIN]).replace(b" ", b"")[:2] in (b"[[", b'["')
        first, *others = _decode_list(apart.prompt) if several else (apart.prompt,)
        prompt = _decode_any(first)
        if several:
            prompt = [prompt, *others]
    except UNREADABLE:
        prompt = None
    return {"messages": messages, "prompt": prompt, "tools": apart.tools}


def found_to_forward(body: bytes, *, names: bool = False) -> Found:
    try:
        forwarded = _decode_forwarded(body)
        named = named_in(body) if names else NamedResponses()
    except UNREADABLE as error:
        return Found({}, chat=False, error=str(error))
    fields = {"model": forwarded.model} if isinstance(forwarded.model, str) else {}
    if forwarded.cache_salt is not None:
        fields["cache_salt"] = lenient(forwarded.cache_salt, str)
    return Found(fields, chat=False, named=named)


def sent(body: bytes, peek: Peek, make: Make) -> tuple[bytes | None, bool]:
    """The body to send to replicas, if it differs from the client's, and whether it has the salt of `make`.

    Ours are sent only what they would read: thirty megabytes of unknown fields would keep their clients waiting too.
    There the salt stays the client's, which is short enough for a body; the envelope says the one that counts.
    """
    if make.native and make.strict:
        return msgspec.json.encode(read(body, APIS[make.api].request_type)), False
    if make.salt is None or make.salt == peek.cache_salt:
        return None, False
    return salted(body, peek, make.salt), True


def limit_memory(most_bytes: int | None) -> None:
    """Limit the process to this many bytes beyond its current size; None removes the limit."""
    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if most_bytes is not None:
        with open("/proc/self/statm") as statm:
            soft = int(statm.read().split()[0]) * resource.getpagesize() + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output to stdout must not mix with messages
    gc.collect()
    gc.freeze()
    gc.disable()  # millions of lists of one body would be looked at again and again, and hold no cycles
    Process(sys.stdin.buffer, sink).run()


if __name__ == "__main__":
    main()
