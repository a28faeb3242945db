"""Ids of stored responses: each says which replica keeps it, and proves whose it is, so no router has to remember that.

The router names each response: `resp_` and 64 hexadecimal digits, of which 24 are random, 8 stand for the replica,
8 for the model, and 24 prove all that by the salt of the key that it is made for. Keys without a salt have everything
in common; the proof of theirs is made with an empty one, so that the responses of others are not among it.
"""

import hmac
import re
import secrets
from typing import NamedTuple

from xxhash import xxh32_hexdigest

from api.errors import ApiError, quoted

_NAMED = re.compile(r"resp_([0-9a-f]{24})([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{24})")
_PROOF_DIGITS = 24


class Made(NamedTuple):
    """The content of a response's id, as digests."""

    replica: str
    model: str

    def at(self, replica: str) -> bool:
        return self.replica == _short(replica)

    def by(self, model: str) -> bool:
        return self.model == _short(model)


def new_response_id(salt: str | None, replica: str, model: str) -> str:
    said = secrets.token_hex(12) + _short(replica) + _short(model)
    return f"resp_{said}{_proof(said, salt)}"


def made_for(response_id: str, salt: str | None) -> Made | None:
    """Read the id, if the router gave it to a response for a key with this salt."""
    found = _NAMED.fullmatch(response_id)
    if found is None:
        return None
    drawn, replica, model, proof = found.groups()
    is_proved = hmac.compare_digest(proof, _proof(drawn + replica + model, salt))
    return Made(replica, model) if is_proved else None


def checked(response_id: str, salt: str | None, param: str | None, *, has_salts: bool) -> Made | None:
    """Read the id; None: a replica made it up itself. ApiError 404 where it may be another tenant's.

    `has_salts`: some keys have a salt, so an id without a proof may be theirs.
    """
    made = made_for(response_id, salt)
    if made is None and (has_salts or _NAMED.fullmatch(response_id) is not None):
        raise no_response(response_id, param)
    return made


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
