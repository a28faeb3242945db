"""The protocol of router and native replicas beside OpenAI's API. New fields go last, with defaults.

A request: `u32 LE: header length | Native as msgpack | the client's JSON body, untouched`.
An answer: frames of `u32 LE: choice index | u32 LE: number of token ids | u32 LE: number of bytes | ids | bytes`; an id
is u32 LE, and the bytes of all frames together are what a plain client would have got. With `tells_use` another frame
comes when each choice begins: its index is USE_INDEX, its two ids are the tokens of the prompt that were computed for
this choice, and those that were cached.
"""

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from api.errors import invalid, quoted
from api.reading import media_type
from api.retention import Retained

REQUEST_TYPE = "application/x-warmroute-request"
FRAMES_TYPE = "application/x-warmroute-frames"
CONTENT_TYPE_HEADER = "x-warmroute-content-type"  # the type of the bytes inside the frames
PRIORITY_HEADER = "x-warmroute-priority"  # replaces the envelope when a gateway forwards the request
CACHED_TOKENS_HEADER = "x-warmroute-cached-tokens"  # the first choice's figure, on every answer, native or not

USE_INDEX = 2**32 - 1  # no choice has it; it marks a frame of figures
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_KV_SOURCES = 2
MAX_ENDPOINT_CHARS = 256

_KV_ENDPOINT = re.compile(r"\Atcp://[^\s/@]+:[0-9]{1,5}\Z")
_LENGTH = struct.Struct("<I")
FRAME = struct.Struct("<III")
_INT64 = Meta(ge=-(2**63), le=2**63 - 1)


class KvSource(Struct, frozen=True):
    """A neighbour that should hold the KV of a prompt's first tokens; nobody but the router may name one."""

    endpoint: Annotated[str, Meta(max_length=MAX_ENDPOINT_CHARS, pattern=_KV_ENDPOINT.pattern)]
    tokens: Annotated[int, Meta(ge=1, lt=2**31)]


class Native(Struct, omit_defaults=True):
    """The router's additions to a client's request."""

    prompts: list[bytes] = []  # token ids, packed, one per prompt
    resume_token_ids: list[bytes] = []  # ids that another replica has generated already, packed, one per choice
    response_id: Annotated[str, Meta(max_length=256)] | None = None
    created: Annotated[int, _INT64] | None = None
    seed: Annotated[int, _INT64] | None = None  # used where the client gave none
    priority: float = 0.0  # seconds: it counts as having come this much later than it did
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None  # instead of the client's, which it may contain
    kv_sources: Annotated[list[KvSource], Meta(max_length=MAX_KV_SOURCES)] = []  # the best is first; for one prompt
    retain: Retained = []  # beginnings of the prompt to keep in the cache; they count where `prompts` is given
    tells_use: bool = False  # the router cannot know what the prompts cost: say so in the answer
    is_cold: bool = False  # its tenant's prompts do not come again: what is computed for it needs no place in the cache


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Native).decode


def is_kv_endpoint(endpoint: str) -> bool:
    """Return whether neighbours can be told to read a replica's blocks there."""
    return len(endpoint) <= MAX_ENDPOINT_CHARS and _KV_ENDPOINT.search(endpoint) is not None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def envelope(native: Native) -> bytes:
    """The bytes in front of the client's body."""
    header = _encode(native)
    return _LENGTH.pack(len(header)) + header


def is_enveloped(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether a request's body begins with an envelope, as only routers send it."""
    return media_type(headers) == REQUEST_TYPE.encode()


def unwrap(body: bytes) -> tuple[Native, bytes]:
    if len(body) < _LENGTH.size:
        raise invalid(f"a {REQUEST_TYPE} body begins with 4 bytes of length; this one has {len(body)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    if end > len(body):
        raise invalid(f"the header of a {REQUEST_TYPE} body ends at byte {end}; the body has {len(body)}")
    try:
        native = _decode(body[_LENGTH.size : end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the header of a {REQUEST_TYPE} body is not the msgpack of Native: {error}") from error
    _check(native)
    return native, body[end:]


def without_envelope(priority: str | None) -> Native:
    """The additions to a request that is the client's own, but for this header."""
    if priority is None:
        return Native()
    try:
        native = Native(priority=float(priority))
    except ValueError:
        raise invalid(f"{PRIORITY_HEADER} is {quoted(priority)}; it must be a number of seconds") from None
    _check(native)
    return native


def _check(native: Native) -> None:
    for name in ("prompts", "resume_token_ids"):
        for i, packed in enumerate(getattr(native, name)):
            if len(packed) % 4:
                raise invalid(f"{name}[{i}] has {len(packed)} bytes; token ids take 4 bytes each", f"{name}[{i}]")
    if not abs(native.priority) < float("inf"):
        raise invalid(f"priority is {native.priority}; it must be finite", "priority")


class Frame(Struct, frozen=True):
    index: int  # the choice's number
    packed_ids: bytes
    payload: bytes

    @property
    def token_ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)


def encode_frame(index: int, token_ids: Sequence[int], payload: bytes) -> bytes:
    count = len(token_ids)
    return struct.pack(f"<III{count}I", index, count, len(payload), *token_ids) + payload


def encode_use(computed: int, cached: int) -> bytes:
    """The frame of figures for a choice that begins."""
    return encode_frame(USE_INDEX, (computed, cached), b"")


class FrameReader:
    """Splits a stream of bytes into frames; raises ValueError for a frame above the limit."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self.rest = bytearray()  # the beginning of a frame
        self._wanted = FRAME.size  # how many bytes `rest` must have before it is worth a look

    @property
    def pending_bytes(self) -> int:
        """The received bytes of an unfinished frame; 0 at a clean end."""
        return len(self.rest)

    def feed(self, chunk: bytes) -> list[Frame]:
        if self.rest:
            self.rest += chunk
            if len(self.rest) < self._wanted:
                return []
            chunk = bytes(self.rest)
        frames: list[Frame] = []
        start = 0
        while True:
            ids_start = start + FRAME.size
            if len(chunk) < ids_start:
                self._wanted = FRAME.size
                break
            id_count: int
            payload_bytes: int
            index, id_count, payload_bytes = FRAME.unpack_from(chunk, start)
            ids_end = ids_start + 4 * id_count
            end = ids_end + payload_bytes
            if end - start > self._max_frame_bytes:
                raise ValueError(f"a frame of {end - start} bytes; at most {self._max_frame_bytes} are taken")
            if len(chunk) < end:
                self._wanted = end - start
                break
            frames.append(Frame(index, chunk[ids_start:ids_end], chunk[ids_end:end]))
            start = end
        self.rest = bytearray(chunk[start:])
        return frames
