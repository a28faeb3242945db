"""Models under other names: requests for one get another, or one of several by weights.

A conversation stays with the model that it was given: the choice is made by its session, else by how it begins.
Weights are shares of conversations.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_64_intdigest

from router.prompts.prompt import UNREADABLE

BEGINNING = 1024  # characters of a prompt, and of each of the first messages
SCANNED_BYTES = 16 * 1024  # of a field, to find them
MOST_KEYS = 1_000_000  # in a body, at any depth
POINTS = 1 << 64

# From the body's prompt_cache_key to the session.
SessionOf: TypeAlias = Callable[[str | None], str | None]
# From a response's id to the model that gave it.
KeptBy: TypeAlias = Callable[[str], str | None]
ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
Weight: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]


class Target(NamedTuple):
    model: str
    weight: int


class Rules(Struct, frozen=True):
    exact: Mapping[str, Sequence[Target]] = {}  # by the name that is asked for
    otherwise: Sequence[Target] = ()  # for all others; empty: they stay as they are

    @property
    def is_empty(self) -> bool:
        return not self.exact and not self.otherwise

    @property
    def has_shares(self) -> bool:
        return any(len(targets) > 1 for targets in (*self.exact.values(), self.otherwise))

    def targets(self, model: str) -> Sequence[Target]:
        return self.exact.get(model, self.otherwise)


NO_RULES = Rules()


class _Asked(Struct):
    model: str | None = None


class _Rewrite(Struct, forbid_unknown_fields=True):
    targets: Annotated[dict[ModelName, Weight], Meta(min_length=1, max_length=100)]
    model: ModelName | None = None


class _File(Struct, forbid_unknown_fields=True):
    rewrites: Annotated[list[_Rewrite], Meta(max_length=10_000)] = []


_decode_asked = msgspec.json.Decoder(_Asked).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encoder = msgspec.json.Encoder()
_decoder = json.JSONDecoder()
_WHITESPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")


def parse_rewrites(path: str, text: str) -> Rules:
    """Parse the whole file; raise ValueError with what is wrong in it."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    exact: dict[str, Sequence[Target]] = {}
    otherwise: Sequence[Target] = ()
    for rewrite in file.rewrites:
        targets = [Target(*target) for target in rewrite.targets.items()]
        if rewrite.model is None:
            if otherwise:
                raise ValueError(f"{path}: two tables without a model would both be for all other models; leave one")
            otherwise = targets
        elif rewrite.model in exact:
            raise ValueError(f"{path}: the model {rewrite.model!r} is in two tables; put its targets into one")
        else:
            exact[rewrite.model] = targets
    return Rules(exact, otherwise)


def rewritten(
    rules: Rules, body: bytes | bytearray, session_of: SessionOf, kept_by: KeptBy = lambda _: None
) -> bytearray | None:
    """Return the body for the model that the request gets; None: it gets what it asks for."""
    try:
        asked = _decode_asked(body).model
        if asked is None or not (targets := rules.targets(asked)) or body.count(b'":') > MOST_KEYS:
            return None
        fields = _decode_fields(body)
    except UNREADABLE:
        return None  # whoever reads it refuses it
    model = targets[0].model if len(targets) == 1 else _one_of(asked, targets, fields, session_of, kept_by)
    if model == asked:
        return None
    written = bytearray()
    _encoder.encode_into(fields | {"model": model}, written)
    return written


def _one_of(
    asked: str, targets: Sequence[Target], fields: Mapping[str, Raw], session_of: SessionOf, kept_by: KeptBy
) -> str:
    previous = _text(fields.get("previous_response_id"))
    model = None if previous is None else kept_by(previous)
    if model is not None and any(target.model == model for target in targets):
        return model
    return chosen(asked, targets, _conversation(fields, session_of))


def chosen(asked: str, targets: Sequence[Target], conversation: str) -> str:
    """Choose one of several targets for a conversation, by weighted rendezvous hashing.

    A change of weights, or of the targets, moves only conversations to a target that gains, or from one that loses.
    """
    said = conversation.encode("utf-8", "surrogatepass")

    def score(target: Target) -> float:
        seed = xxh3_64_intdigest(f"{asked}\0{target.model}".encode("utf-8", "surrogatepass"))
        point = (xxh3_64_intdigest(said, seed=seed) + 0.5) / POINTS
        return -target.weight / math.log(point) if point < 1 else math.inf

    return max(targets, key=score).model


# ---- conversations


def _conversation(fields: Mapping[str, Raw], session_of: SessionOf) -> str:
    """Return what stays the same while a conversation goes on: its session, or what it begins with."""
    if (session := session_of(_text(fields.get("prompt_cache_key")))) is not None:
        return session
    for name in ("messages", "input", "prompt"):
        if (said := fields.get(name)) is not None:
            return _beginning(bytes(memoryview(said)[:SCANNED_BYTES]).decode("utf-8", "ignore"))
    return ""


def _beginning(said: str) -> str:
    """Return the texts up to the first one of a user. What cannot be read so far counts as it is written."""
    if said.startswith('"'):
        return _cut_text(said)[:BEGINNING]
    texts, place = [], said.find("[") + 1
    try:
        while place < len(said) and said[place] != "]":
            item, place = _decoder.raw_decode(said, _WHITESPACE.match(said, place).end())  # type: ignore[union-attr]
            texts.append(_text_of(item)[:BEGINNING])
            if isinstance(item, dict) and item.get("role") == "user":
                break
            place = _BETWEEN.match(said, place).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        texts.append(said[place : place + BEGINNING])
    return "\n".join(texts)[: 8 * BEGINNING]


def _text_of(item: object) -> str:
    """Return what a message says, however its parts are written: as one text, or as a list of them."""
    content = item.get("content") if isinstance(item, dict) else item
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else json.dumps(content)


def _cut_text(written: str) -> str:
    """Decode a text in JSON of which the end may be missing."""
    try:
        text: str = _decoder.raw_decode(written)[0]
    except ValueError:
        end = written.rfind("\\", len(written) - 12)
        cut = written if end < 0 else written[:end].rstrip("\\")
        try:
            text = json.loads(cut + '"')
        except ValueError:
            text = written
    return text


def _text(field: Raw | None) -> str | None:
    try:
        return None if field is None else _decode_text(field)
    except UNREADABLE:
        return None
