"""Models under other names: requests for one get another, or one of several by weights.

A conversation stays with the model that it was given: the choice is made by its session, else by how it begins.
Weights are shares of conversations, and a change of them moves as few of these as it can.
"""

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_64_intdigest

from router.prompts.prompt import UNREADABLE

BEGINNING_BYTES = 1024  # of a prompt, and of each of the first messages
FIRST_MESSAGES = 2  # instructions are often the same in all conversations; with the first question they seldom are
POINTS = 1 << 64
CONVERSATIONS = ("messages", "input", "prompt")  # the fields with what a request says

SessionOf: TypeAlias = Callable[[str | None], str | None]  # from the body's prompt_cache_key
Kept: TypeAlias = Callable[[str], Collection[str]]  # from a response's id: models, one of which made it
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
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


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


def rewritten(rules: Rules, body: bytes | bytearray, session_of: SessionOf, kept: Kept = lambda _: ()) -> bytes | None:
    """Return the body for the model that the request gets; None: it gets what it asks for."""
    try:
        asked = _decode_asked(body).model
        if asked is None or not (targets := rules.targets(asked)):
            return None
        fields = _decode_fields(body)
    except UNREADABLE:
        return None  # whoever reads it refuses it
    model = targets[0].model if len(targets) == 1 else _one_of(asked, targets, fields, session_of, kept)
    if model == asked:
        return None
    return msgspec.json.encode(fields | {"model": model})


def _one_of(asked: str, targets: Sequence[Target], fields: Mapping[str, Raw], session_of: SessionOf, kept: Kept) -> str:
    previous = _text(fields.get("previous_response_id"))
    models = () if previous is None else kept(previous)
    continued = next((target.model for target in targets if target.model in models), None)
    return continued or chosen(asked, targets, _conversation(fields, session_of))


def chosen(asked: str, targets: Sequence[Target], conversation: bytes) -> str:
    """Choose one of several targets for a conversation."""
    ends = list(accumulate(target.weight for target in targets))
    point = xxh3_64_intdigest(conversation, seed=xxh3_64_intdigest(asked.encode("utf-8", "replace")))
    place = point * ends[-1] // POINTS
    return next(target.model for target, end in zip(targets, ends, strict=True) if place < end)


def _conversation(fields: Mapping[str, Raw], session_of: SessionOf) -> bytes:
    """Return what stays the same while a conversation goes on."""
    if (session := session_of(_text(fields.get("prompt_cache_key")))) is not None:
        return session.encode("utf-8", "replace")
    said = next((fields[name] for name in CONVERSATIONS if name in fields), Raw(b""))
    try:
        items = _decode_items(said)
    except UNREADABLE:
        return bytes(said)[:BEGINNING_BYTES].rstrip(b'"')
    return b"\n".join(bytes(item)[:BEGINNING_BYTES] for item in items[:FIRST_MESSAGES])


def _text(field: Raw | None) -> str | None:
    try:
        return None if field is None else _decode_text(field)
    except UNREADABLE:
        return None
