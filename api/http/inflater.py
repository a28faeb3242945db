"""Inflates bodies that came with `Content-Encoding: gzip`, slice by slice, so that a small one stays bounded."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable

from api.errors import ApiError, invalid, quoted

SLICE_BYTES = 256 * 1024  # inflated at once: others are served between two slices
INPUT_BYTES = 16 * 1024  # given to zlib at once, which copies what it leaves
_GZIP = 16 + zlib.MAX_WBITS
_AS_IT_IS = ("", "identity")


class Inflater:
    """One body: `feed` what comes, `take` while `waiting_bytes` are left, `finish` at the end."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP)
        self._packed = bytearray()
        self._input = b""  # taken from there, and not inflated yet

    @property
    def waiting_bytes(self) -> int:
        return len(self._packed) + len(self._input)

    def feed(self, packed: bytes | bytearray) -> None:
        self._packed += packed

    def take(self) -> bytes:
        """The next bytes of the body, at most SLICE_BYTES; raise ApiError 400 if they cannot be inflated."""
        if not self._input:
            self._input = bytes(self._packed[:INPUT_BYTES])
            del self._packed[:INPUT_BYTES]
        try:
            plain = self._stream.decompress(self._input, SLICE_BYTES)
        except zlib.error as error:
            raise _bad(f"it cannot be inflated ({error})") from None
        self._input = self._stream.unconsumed_tail
        if self._stream.eof and (self._stream.unused_data or self._packed):
            raise _bad("more bytes follow its end")
        return plain

    def finish(self) -> None:
        """Raise ApiError 400 unless the body is complete."""
        if not self._stream.eof:
            raise _bad("it is cut short")


def inflater_for(headers: Iterable[tuple[bytes, bytes]]) -> Inflater | None:
    """An inflater if the body is compressed; raise ApiError 415 for any coding but gzip."""
    codings = [value for name, value in headers if name == b"content-encoding"]
    if not codings:
        return None
    coding = b", ".join(codings).decode("latin-1").strip().lower()
    if coding in ("gzip", "x-gzip"):
        return Inflater()
    if coding in _AS_IT_IS:
        return None
    message = f"Content-Encoding is {quoted(coding)}; send gzip, or the body as it is"
    raise ApiError(415, message, code="content_encoding_unknown", headers={"Accept-Encoding": "gzip"})


async def inflated(headers: Iterable[tuple[bytes, bytes]], pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a body as they were before it was compressed; others run between two slices."""
    inflater = inflater_for(headers)
    async for piece in pieces:
        if inflater is None:
            yield piece
            continue
        inflater.feed(piece)
        while inflater.waiting_bytes:
            yield inflater.take()
            await asyncio.sleep(0)
    if inflater is not None:
        inflater.finish()


def _bad(why: str) -> ApiError:
    return invalid(
        f"Content-Encoding is gzip, but the body is not a gzip stream: {why}; compress it anew, or send it as it is"
    )
