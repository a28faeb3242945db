"""KV handed from the replica that computes a prompt to the one that generates its answer, in the words of each engine.

Step one asks the prefill replica for one token. Step two is the client's own request at the replica that generates.

vLLM 0.33's NixlConnector: step one has `do_remote_decode`, and its answer names the blocks that it holds for a reader
(`kv_transfer_params`), with which step two reads them. There is a lease of 30 s on the blocks, which the reader renews
from when it has the request, and one read, after which the blocks may be anybody's. So parameters that have reached a
replica are never sent again.

Ours: after step one the prompt's blocks are in the cache, where any replica of the same layout may read them, more than
once. Step two names the prefill replica first among its sources (`api.native.Native`).
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from api.generation_apis import APIS
from api.native import KvSource, Native, envelope
from router.placement.decision import Decision
from router.prompts.prompt import UNREADABLE, Prompt

MOST_BODY_BYTES = 2 * 1024 * 1024  # half a million tokens; it is parsed once more, within milliseconds
MOST_NESTED = 16 * 1024  # lists and objects
HELD_S = 20.0  # how long parameters are used: vLLM's lease less the time to reach the reader; ours may be evicted
MOST_ANSWER_BYTES = 8 * 1024 * 1024  # of a prefill replica: it names every block, of each KV-cache group

# Parsers take the last of two fields, so these stand for the client's own.
_ONE_TOKEN = {
    "chat": b',"max_tokens":1,"max_completion_tokens":1,"min_tokens":0,"stream_options":null',
    "completions": b',"max_tokens":1,"min_tokens":0,"stream_options":null',
    "messages": b',"max_tokens":1',
    "responses": b',"max_output_tokens":1,"store":false',
}


_NEUTRAL = {"use_beam_search": False, "echo": False, "background": False}  # beside null


class _Asked(Struct):
    """Fields of requests with several prompts or answers, or of which one replica needs all."""

    use_beam_search: Any = None
    echo: Any = None
    background: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    previous_response_id: Any = None
    kv_transfer_params: Any = None  # the client's own, where they are passed on


class _Params(Struct):
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_prefill_cached_tokens: int | None = None


class _Answer(Struct):
    kv_transfer_params: Raw = Raw(b"null")


class Handed(Struct, frozen=True):
    """KV that a prefill replica holds: of vLLM, for one reader."""

    params: bytes  # as vLLM wrote them; empty: a replica of ours
    until_s: float  # may they be sent to the reader
    cached_tokens: int | None = None  # that it had found in its own cache


_decode_asked = msgspec.json.Decoder(_Asked).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_params = msgspec.json.Decoder(_Params | None).decode


def why_whole(api: str, prompt: Prompt, body: bytes | bytearray, *, needs_tokens: bool) -> str | None:
    """The reason why one replica has to take both halves of this request; None if two may.

    `needs_tokens`: their engine gets its tokens.
    """
    if api not in APIS:
        return f"requests of {api} have several prompts"
    if needs_tokens and not prompt.packed:
        return "its tokens are not known here"
    if len(body) > MOST_BODY_BYTES or body.count(b"[") + body.count(b"{") > MOST_NESTED:
        return "its body takes long to be read again"
    if prompt.choices != 1 or len(prompt.packed) > 1:
        return "it has several prompts or choices"
    try:
        asked = _decode_asked(body)
    except UNREADABLE:
        return "its body cannot be read"
    name = next(
        (name for name in _Asked.__struct_fields__ if getattr(asked, name) not in (None, _NEUTRAL.get(name))), None
    )
    return None if name is None else f"{name} needs all of it at one replica"


def prefill_body(api: str, body: bytes, hand_over: bytes) -> bytes:
    """The client's request, for its first token alone."""
    return body.rstrip()[:-1] + _ONE_TOKEN[api] + hand_over


def prefill_envelope(prompt: Prompt, decision: Decision, now_s: float) -> bytes:
    """The bytes before that request for a replica of ours, which may read a part of the prompt from neighbours, too."""
    sources = [KvSource(one.endpoint, one.tokens) for one in decision.neighbours]
    priority = decision.priority_s(now_s)
    return envelope(Native(prompts=prompt.packed, priority=priority, cache_salt=prompt.salt, kv_sources=sources))


def with_handed(body: bytes, handed: Handed) -> bytes:
    """The client's request for the replica that generates: with the parameters of the one that computed."""
    return body.rstrip()[:-1] + b',"kv_transfer_params":' + handed.params + b"}"


def handed_in(answer: bytes, now_s: float) -> Handed | None:
    """The parameters in a prefill replica's answer; None if it hands nothing over."""
    try:
        raw = bytes(_decode_answer(answer).kv_transfer_params)
        params = _decode_params(raw)
    except UNREADABLE:
        return None
    if params is None or not params.do_remote_prefill or params.remote_engine_id is None:
        return None
    return Handed(raw, now_s + HELD_S, params.remote_prefill_cached_tokens)


# ---- the beginning of an answer whose KV is fetched

_ERRORS = (b'data: {"error"', b"event: error\n", b"event: response.failed\n")
MOST_BEGINNING_BYTES = 64 * 1024
_BEFORE_TOKENS = {"chat": 1, "completions": 0, "messages": 1, "responses": 2}  # events that come before any token


class Beginning:
    """Holds the first events of a stream back: vLLM tells only there that it could not read the KV."""

    __slots__ = ("_events", "_held")

    def __init__(self, api: str) -> None:
        self._events = _BEFORE_TOKENS[api]
        self._held = b""

    def feed(self, body: bytes, complete: bool) -> bytes | None:
        """Return all that is held as soon as a token has come, or the end; None before."""
        self._held += body
        if not complete and len(self._held) < MOST_BEGINNING_BYTES and self._held.count(b"\n\n") <= self._events:
            return None
        return self._held

    @property
    def has_failed(self) -> bool:
        """Tell whether the stream is an error instead of an answer."""
        return any(event.lstrip().startswith(_ERRORS) for event in self._held.split(b"\n\n"))
