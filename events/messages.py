"""The wire format: KV event batches as vLLM sends them, and what other engines send read as the same.

Rules for editing: the first seven fields of BlockStored are always on the wire, the others only when set; new fields go
last, with a default; nothing is renamed. `docs/wire.md` says what each engine sends.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

Hash: TypeAlias = int | bytes
# SGLang's EAGLE sends pairs of (token, next token), TensorRT-LLM may send strings.
Token: TypeAlias = int | str | tuple[int, int]
# Per block: null, or [lora_name, [mm_id, offset], salt, embed_digest] with only the parts present, untagged.
ExtraKeys: TypeAlias = list[list[Any] | None]
REMOTE = "REMOTE"  # the locality of blocks in a place that replicas share
# One ZeroMQ message.
Frames: TypeAlias = list[bytes]
END_SEQ = b"\xff" * 8  # the number of the marker that ends a replay


class BlockStored(Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[Token]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    # Never sent by vLLM: SGLang's salt and metadata, TensorRT-LLM's multimodal keys.
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    mm_keys: list[Any] | None = None


class BlockRemoved(Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, tag=True, forbid_unknown_fields=True, gc=False):
    pass


class UnknownEvent(Struct, tag="<unknown>", gc=False):
    """Stands where an event of a type we do not know was skipped."""

    type_name: str


class RejectedEvent(Struct, tag="<rejected>", gc=False):
    """Replaces an unreadable event of a known type, whose change is lost."""

    reason: str


KnownEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent | RejectedEvent


class EventBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


# A batch that is longer is read event by event.
WHOLE_BYTES = 256 * 1024
MAX_EVENTS = 262_144  # the limit for such a batch
# The limit for one of its events: a million nested lists are 80 ms of work in one piece.
MAX_NESTED_BYTES = 2**20
MAX_TOLERANT_BYTES = 2 * 2**20


class BadBatch(ValueError):
    """A payload that is no event batch."""


class _WireBatch(EventBatch, array_like=True, forbid_unknown_fields=True, gc=False):
    events: list[KnownEvent]  # type: ignore[assignment]


class _StoredSkimmed(BlockStored, tag="BlockStored", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    token_ids: Raw


class _StoredLarge(BlockStored, tag="BlockStored", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Its lists of lists are counted before they are made."""

    token_ids: Raw
    extra_keys: Raw = Raw()  # type: ignore[assignment]
    lookahead_token_ids: Raw = Raw()  # type: ignore[assignment]
    metadata: Raw = Raw()  # type: ignore[assignment]
    mm_keys: Raw = Raw()  # type: ignore[assignment]


class _Outline(Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _WireBatchSkimmed(EventBatch, array_like=True, forbid_unknown_fields=True, gc=False):
    events: list[_StoredSkimmed | BlockRemoved | AllBlocksCleared]  # type: ignore[assignment]


def _as_list(value: object) -> list[int]:
    """An engine may keep its token ids in an array; on the wire they are a list."""
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be part of an event")


encode_batch: Callable[[EventBatch], bytes] = msgspec.msgpack.Encoder(enc_hook=_as_list).encode

_decode_wire = msgspec.msgpack.Decoder(_WireBatch).decode
_decode_skimmed = msgspec.msgpack.Decoder(_WireBatchSkimmed).decode
_decode_anything = msgspec.msgpack.Decoder().decode
_decode_token_ids = msgspec.msgpack.Decoder(list[Token]).decode
_decode_plain_ids = msgspec.msgpack.Decoder(list[int]).decode
_decode_outline = msgspec.msgpack.Decoder(_Outline).decode
_decode_large = msgspec.msgpack.Decoder(_StoredLarge | BlockRemoved | AllBlocksCleared).decode
_decode_nested: dict[str, Callable[[Raw], Any]] = {
    "extra_keys": msgspec.msgpack.Decoder(ExtraKeys | None).decode,
    "lookahead_token_ids": msgspec.msgpack.Decoder(list[list[int]] | None).decode,
    "metadata": msgspec.msgpack.Decoder(dict[str, Any] | None).decode,
    "mm_keys": msgspec.msgpack.Decoder(list[Any] | None).decode,
}

_EVENT_TYPES: dict[str, type[KnownEvent]] = {t.__name__: t for t in (BlockStored, BlockRemoved, AllBlocksCleared)}

# The order of an array event's fields, up to the last version of each engine that sent arrays.
_ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": BlockStored.__struct_fields__[:11],
    "BlockRemoved": BlockRemoved.__struct_fields__[:3],
    "AllBlocksCleared": (),
}


class Decoder:
    """Reads the batches of any engine's stream, and counts skipped parts.

    The strict reading of vLLM's current format is tried until it fails once; from then on every batch takes the
    tolerant reading, which knows the other layouts and counts what it does not know. `skim` leaves token ids undecoded
    on the strict path, for streams whose hashes already are block keys.
    """

    def __init__(self, *, skim: bool = False) -> None:
        self._preferred: Callable[[bytes], Any] = _decode_skimmed if skim else _decode_wire
        self._strict: Callable[[bytes], Any] | None = self._preferred
        self._skim = skim
        self.unknown_types: Counter[str] = Counter()
        self.unknown_fields: Counter[str] = Counter()
        self.rejected_events = 0

    def unknown(self, most: int) -> dict[str, int]:
        """The event types and fields that are not read, the most frequent ones, as often as they came."""
        if not self.unknown_types and not self.unknown_fields:
            return {}
        return dict((self.unknown_types + self.unknown_fields).most_common(most))

    def restart(self) -> None:
        """Another publisher: it may send another format."""
        self._strict = self._preferred

    def decode(self, payload: bytes, name: str = "batch") -> EventBatch:
        """`name` says in the error which batch this was."""
        if self._strict is not None:
            try:
                batch: EventBatch = self._strict(payload)
                return batch
            except (msgspec.ValidationError, UnicodeDecodeError):
                self._strict = None
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadBatch(f"{name}: not msgpack: {error}") from error
        try:
            raw = _decode_anything(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
            raise BadBatch(f"{name}: not msgpack: {error}") from error
        if not isinstance(raw, list) or len(raw) < 2:
            raise BadBatch(f"{name}: a batch is an array [ts, events, rank], this is {_shape(raw)}")
        ts, events, rank = raw[0], raw[1], raw[2] if len(raw) > 2 else None
        if type(ts) not in (int, float):
            raise BadBatch(f"{name}: the time stamp is {_shape(ts)}, not a number")
        if not isinstance(events, list):
            raise BadBatch(f"{name}: the events are {_shape(events)}, not an array")
        if rank is not None and type(rank) is not int:
            raise BadBatch(f"{name}: the data-parallel rank is {_shape(rank)}, not an integer")
        if len(raw) > 3:
            _count(self.unknown_fields, "batch[3:]")
        return EventBatch(float(ts), [self._event(event) for event in events], rank)

    def events(self, payload: bytes, name: str = "batch") -> Iterator[Event]:
        """The events of a batch; a long batch is decoded lazily, one by one."""
        if len(payload) <= WHOLE_BYTES:
            yield from self.decode(payload, name).events
            return
        try:
            outline = _decode_outline(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadBatch(f"{name}: no batch of at most {MAX_EVENTS:,} events: {error}") from error
        for raw in outline.events:
            yield self._large_event(raw)

    def _large_event(self, raw: Raw) -> Event:
        try:
            if self._strict is not None:
                try:
                    event = _decode_large(raw)
                    return _unpacked(event, self._skim) if isinstance(event, _StoredLarge) else event
                except (msgspec.ValidationError, UnicodeDecodeError):
                    self._strict = None
            if len(bytes(raw)) > MAX_TOLERANT_BYTES:
                raise ValueError(f"an event of {len(bytes(raw)):,} bytes; at most {MAX_TOLERANT_BYTES:,} are read")
            return self._event(_decode_anything(raw))
        except (ValueError, TypeError, RecursionError) as error:  # every error of msgspec is one of these
            self.rejected_events += 1
            return RejectedEvent(str(error))

    def _event(self, raw: object) -> Event:
        try:
            if isinstance(raw, dict):
                name, fields = raw.pop("type", None), raw
                if not isinstance(name, str):
                    raise ValueError(f"an event's type is {_shape(name)}, not a string")
            elif isinstance(raw, list) and raw and isinstance(raw[0], str):
                name, values = raw[0], raw[1:]
                names = _ARRAY_FIELDS.get(name, ())
                if name == "BlockStored" and len(values) > 6 and isinstance(values[6], dict):
                    names = (*names[:6], "metadata")  # SGLang 0.5.18 sends its metadata where vLLM has lora_name
                fields = dict(zip(names, values, strict=False))
                if len(values) > len(names) and name in _ARRAY_FIELDS:
                    fields[f"[{len(names) + 1}:]"] = values[len(names) :]
            else:
                what = "a map with a type, or an array that starts with it"
                raise ValueError(f"an event is {what}; this is {_shape(raw)}")
            event_type = _EVENT_TYPES.get(name)
            if event_type is None:
                _count(self.unknown_types, name)
                return UnknownEvent(name)
            known = {field: fields[field] for field in event_type.__struct_fields__ if field in fields}
            for field in fields.keys() - known.keys():
                _count(self.unknown_fields, f"{name}.{field}")
            if event_type is not AllBlocksCleared:
                known.setdefault("medium", None)  # required on vLLM's wire today, absent in old versions
            if event_type is BlockStored:
                for absent in ("parent_block_hash", "lora_id", "lora_name"):
                    known.setdefault(absent, None)
            return msgspec.convert(known, event_type)
        except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
            self.rejected_events += 1
            return RejectedEvent(str(error))


def decode_batch(payload: bytes) -> EventBatch:
    return Decoder().decode(payload)


def decode_tokens(event: BlockStored) -> BlockStored:
    """The event with its token ids decoded, if a skimming decoder had left them raw; ValueError if they are none."""
    if isinstance(event, _StoredSkimmed):
        fields = {field: getattr(event, field) for field in BlockStored.__struct_fields__}
        try:
            tokens = _decode_token_ids(event.token_ids)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"token_ids are not token ids: {error}") from error
        return BlockStored(**{**fields, "token_ids": tokens})
    return event


def _unpacked(event: _StoredLarge, skim: bool) -> BlockStored:
    """The event with everything decoded but, where they are skimmed, its token ids. ValueError: it is too deep."""
    fields = {field: getattr(event, field) for field in BlockStored.__struct_fields__}
    for field, decode in _decode_nested.items():
        raw = bytes(fields[field])
        if len(raw) > MAX_NESTED_BYTES and raw.count(b"\xc0") < len(raw) - 5:  # more than a length and nulls
            raise ValueError(f"{field} of {len(raw):,} bytes; at most {MAX_NESTED_BYTES:,} are read")
        fields[field] = decode(fields[field]) if raw else None
    if skim:
        return _StoredSkimmed(**fields)
    try:
        fields["token_ids"] = _decode_plain_ids(event.token_ids)
    except msgspec.ValidationError:
        if len(bytes(event.token_ids)) > MAX_TOLERANT_BYTES:
            raise
        fields["token_ids"] = _decode_token_ids(event.token_ids)
    return BlockStored(**fields)


def _count(counter: Counter[str], name: str) -> None:
    """Count by name, in bounded memory for any names."""
    known = name in counter or len(counter) < 256
    counter[name[:80] if known else "(others)"] += 1


def _shape(value: object) -> str:
    """A short description of a wrong value: its type and the beginning of its text."""
    text = repr(value) if not isinstance(value, list | dict) else f"{len(value)} items"
    return f"{type(value).__name__} ({text[:60]})"
