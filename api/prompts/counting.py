"""Counts entries in raw JSON, to refuse too many of them before they are decoded.

Thirty megabytes of JSON can be fifteen million token ids, which take twenty times as much memory as objects. Only what
would be refused in any case is refused here; whatever cannot be counted is left to the reading proper.
"""

from contextlib import suppress
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from api.errors import invalid
from api.openai.requests import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_PROMPTS, MAX_STOP_TOKEN_IDS
from api.prompts.prompts import check_room

NOTHING = Raw(b"")
_SPACE = b" \t\r\n"


class Countable(Protocol):
    """The raw JSON of a request's fields whose entries are counted."""

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
    """Apply `check_counts` to any body; one that cannot be read is left to the decoder."""
    try:
        counted = _decode_counted(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    check_counts(counted, max_model_len, chat=chat)


def check_counts(counted: Countable, max_model_len: int | None, *, chat: bool) -> None:
    """Raise ApiError 400 with the number of entries and the limit, for the fields of such a request."""
    _check_most(_commas(counted.logit_bias), MAX_LOGIT_BIAS, "logit_bias")
    _check_most(_commas(counted.stop_token_ids), MAX_STOP_TOKEN_IDS, "stop_token_ids")
    if chat:
        with suppress(msgspec.MsgspecError):  # only a list has a length
            _check_most(len(_decode_list(counted.messages)), MAX_MESSAGES, "messages")
    for param in ("prompt_token_ids",) if chat else ("prompt", "prompt_token_ids"):
        # Check a list of token ids, or of lists of them; commas in a text mean nothing.
        json = bytes(getattr(counted, param))
        if not json.startswith(b"[") or b'"' in json:
            continue
        _check_most(json.count(b"[") - 1, MAX_PROMPTS, param)
        for ids in json.split(b"]"):
            given: Any = ids.lstrip(b"[," + _SPACE)
            if given:
                check_room(given.count(b",") + 1, max_model_len, param)


def _check_most(entries: int, most: int, param: str) -> None:
    if entries > most:
        raise invalid(f"{param} has {entries:,} entries; send at most {most:,}", param)


def _commas(raw: Raw) -> int:
    """The number of entries in a list or object of numbers."""
    return bytes(raw).count(b",") + 1
