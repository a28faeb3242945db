"""Models under other names: requests for one get another."""

import tomllib
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from router.prompts.prompt import UNREADABLE

MAX_KEYS = 1_000_000  # the limit for a body, at any depth

ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]


class Rules(Struct, frozen=True):
    exact: Mapping[str, str] = {}  # targets by the name that is asked for
    otherwise: str | None = None  # the target of all others; None: they stay as they are

    @property
    def is_empty(self) -> bool:
        return not self.exact and self.otherwise is None

    def target(self, model: str) -> str | None:
        return self.exact.get(model, self.otherwise)


NO_RULES = Rules()


class _Asked(Struct):
    model: str | None = None


class _Rewrite(Struct, forbid_unknown_fields=True):
    target: ModelName
    model: ModelName | None = None


class _File(Struct, forbid_unknown_fields=True):
    rewrites: Annotated[list[_Rewrite], Meta(max_length=10_000)] = []


_decode_asked = msgspec.json.Decoder(_Asked).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encoder = msgspec.json.Encoder()


def parse_rewrites(path: str, text: str) -> Rules:
    """Parse the whole file; raise ValueError with what is wrong in it."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    exact: dict[str, str] = {}
    otherwise = None
    for rewrite in file.rewrites:
        if rewrite.model is None:
            if otherwise is not None:
                raise ValueError(f"{path}: two tables without a model would both be for all other models; leave one")
            otherwise = rewrite.target
        elif rewrite.model in exact:
            raise ValueError(f"{path}: the model {rewrite.model!r} is in two tables; leave one")
        else:
            exact[rewrite.model] = rewrite.target
    return Rules(exact, otherwise)


def rewritten(rules: Rules, body: bytes | bytearray) -> bytearray | None:
    """Return the body for the model that the request gets; None: it gets what it asks for."""
    try:
        asked = _decode_asked(body).model
        if asked is None or (target := rules.target(asked)) in (None, asked) or body.count(b'":') > MAX_KEYS:
            return None
        fields = _decode_fields(body)
    except UNREADABLE:
        return None  # whoever reads it refuses it
    written = bytearray()
    _encoder.encode_into(fields | {"model": target}, written)
    return written
