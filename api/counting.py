"""Refuses what has too many entries by counting them in the JSON, before a list or an object of each is built.

Thirty megabytes of JSON can be fifteen million token ids, which take twenty times as much memory as objects. Only what
would be refused in any case is refused here; whatever cannot be counted is left to the reading proper.
"""

from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from api.errors import invalid
from api.prompts import check_room
from api.requests import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_PROMPTS, MAX_STOP_TOKEN_IDS

NOTHING = Raw(b"")
_SPACE = b" \t\r\n"


class Countable(Protocol):
    """The fields of a request whose entries are counted, as they stand in its JSON."""

    messages: Raw
    prompt: Raw
    prompt_token_ids: Raw
    logit_bias: Raw
    stop_token_ids: Raw


class Counted(Struct):
    messages: Raw = NOTHING
    prompt: Raw = NOTHING
    prompt_token_ids: Raw = NOTHING
    logit_bias: Raw = NOTHING
    stop_token_ids: Raw = NOTHING


_decode_counted = msgspec.json.Decoder(Counted).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode


def check_body(body: bytes, max_model_len: int | None, *, chat: bool) -> None:
    """As `check_counts`, for a body that may be anything: what cannot be read is not refused here."""
    try:
        counted = _decode_counted(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    check_counts(counted, max_model_len, chat=chat)


def check_counts(counted: Countable, max_model_len: int | None, *, chat: bool) -> None:
    """ApiError 400 or 413 that quotes the number of entries and the limit. Only fields of such a request count."""
    _check_most(_commas(counted.logit_bias), MAX_LOGIT_BIAS, "logit_bias")
    _check_most(_commas(counted.stop_token_ids), MAX_STOP_TOKEN_IDS, "stop_token_ids")
    if chat:
        _check_most(_length(counted.messages), MAX_MESSAGES, "messages")
    for param in ("prompt_token_ids",) if chat else ("prompt", "prompt_token_ids"):
        _check_token_ids(bytes(getattr(counted, param)), max_model_len, param)


def _check_most(entries: int, most: int, param: str) -> None:
    if entries > most:
        raise invalid(f"{param} has {entries:,} entries; send at most {most:,}", param)


def _commas(raw: Raw) -> int:
    """The entries of a list or an object in which only numbers may stand."""
    return bytes(raw).count(b",") + 1


def _length(raw: Raw) -> int:
    try:
        return len(_decode_list(raw))
    except msgspec.MsgspecError:
        return 0


def _check_token_ids(json: bytes, max_model_len: int | None, param: str) -> None:
    """A list of token ids, or of lists of them; in a text a comma means nothing."""
    if not json.startswith(b"[") or b'"' in json:
        return
    _check_most(json.count(b"[") - 1, MAX_PROMPTS, param)
    for ids in json.split(b"]"):
        given: Any = ids.lstrip(b"[," + _SPACE)
        if given:
            check_room(given.count(b",") + 1, max_model_len, param)
