"""Ids of stored responses: each says which replica keeps it, and proves whose it is, so no router has to remember that.

The router names each response: `resp_` and 64 hexadecimal digits, of which 24 are random, 8 stand for the replica,
8 for the model, and 24 prove all that by the salt of the key that it is made for. Keys without a salt have everything
in common; the proof of theirs is made with an empty one, so that the responses of others are not among it.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh32_hexdigest

from api.errors import ApiError, quoted
from api.openai_responses.requests import is_response_id
from router.members.broken import Broken
from router.members.fetch import TooLong, fetch
from router.members.members import Member, Members
from router.prompts.prompt import UNREADABLE
from router.proxy.exchange import Exchange

_NAMED = re.compile(r"resp_([0-9a-f]{24})([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{24})")
_PROOF_DIGITS = 24


class Made(NamedTuple):
    """The content of a response's id, as digests."""

    replica: str
    model: str

    def at(self, replica: str) -> bool:
        return self.replica == _short(replica)


def new_response_id(salt: str | None, replica: str, model: str) -> str:
    said = secrets.token_hex(12) + _short(replica) + _short(model)
    return f"resp_{said}{_proof(said, salt)}"


def checked(response_id: str, salt: str | None, param: str | None, *, has_salts: bool) -> Made | None:
    """Read the id; None: a replica made it up itself. ApiError 404 where it may be another tenant's.

    `has_salts`: some keys have a salt, so an id without a proof may be theirs.
    """
    found = _NAMED.fullmatch(response_id)
    if found is not None:
        drawn, replica, model, proof = found.groups()
        if hmac.compare_digest(proof, _proof(drawn + replica + model, salt)):
            return Made(replica, model)
    if has_salts or found is not None:
        raise no_response(response_id, param)
    return None


def no_response(response_id: str, param: str | None) -> ApiError:
    """The same for a response of another tenant and for one that never was."""
    message = f"there is no response {quoted(response_id)}, or no replica has it any more"
    message += "; send the whole conversation as input"
    return ApiError(404, message, param=param, code="response_not_found")


def with_id(body: bytes, response_id: str) -> bytes:
    """The body of a request that asks for this id, last: engines take the last of two fields."""
    end = body.rfind(b"}")
    view = memoryview(body)
    return b"".join((view[:end], b',"request_id":"%b"' % response_id.encode(), view[end:])) if end > 0 else body


def _short(name: str) -> str:
    return xxh32_hexdigest(name.encode("utf-8", "surrogatepass"))


def _proof(said: str, salt: str | None) -> str:
    key = ("" if salt is None else salt).encode("utf-8", "surrogatepass")
    return hmac.digest(key, b"warmroute response\0" + said.encode(), "sha256").hex()[:_PROOF_DIGITS]


# ---- asking replicas for them


MAX_ASKED = 64  # replicas at a time, for all requests together
MAX_FETCHED = 8  # conversations at a time, each of at most 4 MiB
MAX_NAMES = 5  # the replicas that an error lists
ASK_S = 5.0  # a replica may have much to do

T = TypeVar("T")


class _Conversation(Struct):
    items: Raw


_decode_conversation = msgspec.json.Decoder(_Conversation).decode


class KeptResponses:
    """The responses that replicas keep, as far as they say; what all requests ask together is bounded."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._asking = asyncio.Semaphore(MAX_ASKED)
        self._fetching = asyncio.Semaphore(MAX_FETCHED)
        self._joining = asyncio.Lock()  # one body grows in one turn of the loop

    async def holder(self, response_id: str, made: Made | None) -> str | None:
        """The name of the replica that has this response; None: none has it, or there is only one.

        ApiError 503 if one that may have it does not answer.
        """

        async def has(member: Member) -> str | None:
            path = f"/v1/responses/{response_id}"
            answer = await fetch(member.upstream, path, lines=member.own_lines, timeout_s=ASK_S, whole=False)
            return member.name if _is_there(answer.status) else None

        return None if len(self._members.servers) == 1 else await self._first(response_id, made, has)

    async def join(self, exchange: Exchange, response_id: str, made: Made | None, field: str) -> None:
        """Put the response's conversation into the body; ApiError 404 if no replica has it, 503 as of `holder`."""

        async def conversation(member: Member) -> bytes | None:
            path = f"/v1/responses/{response_id}/conversation"
            try:
                answer = await fetch(member.upstream, path, lines=member.own_lines, timeout_s=ASK_S)
            except TooLong as error:
                message = f"the conversation of {quoted(response_id)} is too long: {error}; send what it needs as input"
                raise ApiError(413, message, code="conversation_too_long") from None
            return answer.body if _is_there(answer.status) else None

        async with self._fetching:
            found = await self._first(response_id, made, conversation)
            if found is None:
                raise no_response(response_id, "input" if field == "referenced_items" else "previous_response_id")
            async with self._joining:
                try:
                    items, view = _decode_conversation(found).items, memoryview(exchange.body)
                    before = view[: exchange.body.rindex(b"}")]  # the items come last: of two fields parsers take that
                    exchange.body = bytearray().join((before, b',"%b":' % field.encode(), items, b"}"))
                except UNREADABLE as error:
                    message = f"the items of {quoted(response_id)} cannot be read where they are kept: {error}"
                    raise ApiError(502, message, "server_error", code="response_unreadable") from None
                exchange.hold(len(exchange.body))

    async def _first(
        self, response_id: str, made: Made | None, ask: Callable[[Member], Awaitable[T | None]]
    ) -> T | None:
        """The answer of the first replica that has one: of that which the id names, else of any other."""
        if not is_response_id(response_id):  # it becomes part of a path
            return None
        unheard: list[str] = []

        async def heard(member: Member) -> T | None:
            try:
                async with self._asking:
                    return await ask(member)
            except Broken as broken:
                if broken.silent or not broken.refused:  # else nobody listens there: what it kept is gone
                    unheard.append(member.name)
                return None

        serving = [one for one in self._members if one.candidate.unavailable is None or one.health.draining]
        named = [one for one in serving if made is not None and made.at(one.name)]
        # Ranks behind one address have the same responses, and prefill replicas keep none.
        others = {one.server.name: one for one in reversed(serving) if one.spec.role != "prefill"}
        rest = [one for name, one in others.items() if all(at.server.name != name for at in named)]
        for members in (named, rest):
            asked = [asyncio.ensure_future(heard(member)) for member in members]
            try:
                for answer in asyncio.as_completed(asked):
                    if (found := await answer) is not None:
                        return found
            finally:
                for task in asked:
                    task.cancel()
        if unheard:
            names = ", ".join(unheard[:MAX_NAMES])
            message = f"{names} may have the response {quoted(response_id)}, and does not answer; try again"
            again = {"Retry-After": "1"}
            raise ApiError(503, message, "service_unavailable", code="response_not_asked_for", headers=again)
        return None


def _is_there(status: int) -> bool:
    if status >= 500:
        raise Broken(f"it answers {status}")
    return status == 200
