"""Fetches the conversation of a stored response from its replica, for a request that continues it."""

import asyncio
import re
from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from api.errors import ApiError, quoted
from router.members.broken import Broken
from router.members.fetch import fetch
from router.members.members import Member
from router.prompts.prompt import UNREADABLE, unreadable

_ID = re.compile(r"resp_[\w-]{1,128}", re.ASCII)
MOST_ASKED = 64  # replicas, for a response that the router does not know


class _Conversation(Struct):
    items: Raw


_decode_conversation = msgspec.json.Decoder(_Conversation).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


async def conversation(members: Sequence[Member], response_id: str) -> bytes:
    """The JSON of the response's items; raise ApiError 404 if none of these replicas has it."""
    if _ID.fullmatch(response_id) is None:  # it becomes part of a path
        members = ()
    one_each = list({member.server.name: member for member in members}.values())[:MOST_ASKED]
    found = await asyncio.gather(*(_asked(member, response_id) for member in one_each))
    for items in found:
        if items is not None:
            return items
    where = f"{one_each[0].name}, which made it, no longer has it" if len(one_each) == 1 else "no replica has it"
    message = f"there is no response {quoted(response_id)}: {where}; send the whole conversation as input"
    raise ApiError(404, message, param="previous_response_id", code="response_not_found")


async def _asked(member: Member, response_id: str) -> bytes | None:
    path = f"/v1/responses/{response_id}/conversation"
    try:
        answer = await fetch(member.upstream, path, lines=member.server.key_line)
        return bytes(_decode_conversation(answer.body).items) if answer.status == 200 else None
    except (Broken, *UNREADABLE):
        return None


def continued(body: bytes, items: bytes, field: str) -> bytes:
    """The body with these items, which come before its input or are named there."""
    try:
        fields = _decode_fields(body)
    except UNREADABLE as error:
        raise unreadable(error) from None
    return msgspec.json.encode(fields | {field: Raw(items)})
