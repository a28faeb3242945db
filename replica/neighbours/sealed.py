"""Proof that both ends know the fleet's secret, and seals on all that they say afterwards. Pure.

The secret never travels. Both ends draw a nonce; the session's key is their HMAC under the secret, so nothing that was
recorded is worth anything in another session. Each body is sealed with the session's key, its direction and its number:
it cannot be changed, repeated, left out, reordered or sent back. Payloads have only a checksum, in the sealed header.
Nothing is encrypted.
"""

import hmac
import secrets

from replica.neighbours.messages import MAGIC

NONCE_BYTES = 32
SEAL_BYTES = 32
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
REPLY_BYTES = len(MAGIC) + NONCE_BYTES + SEAL_BYTES

SOURCE, READER = b"source", b"reader"


class NotProven(Exception):
    """The peer does not know the secret, or speaks another protocol."""


class Session:
    """One end of a connection; `own` and `peer` are the two directions."""

    def __init__(self, key: bytes, own: bytes, peer: bytes) -> None:
        self._key = key
        self._own = own
        self._peer = peer
        self._sent = 0
        self._received = 0

    def seal(self, body: bytes) -> bytes:
        self._sent += 1
        return self._seal(self._own, self._sent, body)

    def check(self, seal: bytes | memoryview, body: bytes | memoryview) -> None:
        """Raise NotProven unless the peer has sealed this as its next body."""
        self._received += 1
        if not hmac.compare_digest(self._seal(self._peer, self._received, body), seal):
            raise NotProven("a seal is wrong")

    def _seal(self, direction: bytes, number: int, body: bytes | memoryview) -> bytes:
        return _digest(self._key, direction + number.to_bytes(8, "little") + body)


class Challenge:
    """The source's part of the handshake; fresh for every connection."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.sent = MAGIC + self._nonce

    def accept(self, reply: bytes) -> Session:
        """Return the session if the reply proves the reader; else raise NotProven."""
        nonce, proof = reply[len(MAGIC) : -SEAL_BYTES], reply[-SEAL_BYTES:]
        if len(reply) != REPLY_BYTES or reply[: len(MAGIC)] != MAGIC:
            raise NotProven("the peer speaks another protocol")
        key = _session_key(self._secret, self._nonce, nonce)
        if not hmac.compare_digest(_digest(key, READER), proof):
            raise NotProven("the peer does not know this fleet's secret")
        return Session(key, SOURCE, READER)


def reply_to(secret: bytes, challenge: bytes) -> tuple[bytes, Session]:
    """Return the reader's answer to a challenge, and the session that it begins."""
    if len(challenge) != CHALLENGE_BYTES or challenge[: len(MAGIC)] != MAGIC:
        raise NotProven("the peer speaks another protocol")
    nonce = secrets.token_bytes(NONCE_BYTES)
    key = _session_key(secret, challenge[len(MAGIC) :], nonce)
    return MAGIC + nonce + _digest(key, READER), Session(key, READER, SOURCE)


def _session_key(secret: bytes, source_nonce: bytes, reader_nonce: bytes) -> bytes:
    return _digest(secret, MAGIC + source_nonce + reader_nonce)


def _digest(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
