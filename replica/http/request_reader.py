"""Reads a request: bytes within the limit, the router's additions, the client's JSON, token ids."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request

from api.errors import ApiError, draining, invalid, queue_full, unknown_model
from api.generation_apis import GenerationApi, InnerRequest
from api.http.bodies import MEDIUM_BYTES, Bodies, check_coding, declared_size
from api.native import PRIORITY_HEADER, Native, is_enveloped, unpack_ids, unwrap, without_envelope
from api.openai.requests import ChatRequest
from api.prompts.counting import check_body
from api.prompts.prompts import Prompts, check_room

log = logging.getLogger(__name__)

INLINE_BYTES = 8192  # a longer body is read on a thread: its milliseconds are not taken from other clients' streams
THREADS = 2
WAITING_BODIES = 2  # bodies of the largest size that may wait for the threads

Read = TypeVar("Read")


class ParsedRequest(NamedTuple):
    request: InnerRequest
    native: Native
    prompts: list[list[int]]
    api: GenerationApi | None = None  # None: that of the request's type
    original: Any = None  # the client's own request, where it is of another API
    lora_name: str | None = None  # the adapter that it asks for


class Reader:
    """Owns the threads that read long requests."""

    def __init__(
        self,
        prompts: Prompts,
        model: str,
        max_body_bytes: int,
        bodies: Bodies,
        adapters: Set[str] = frozenset(),
        *,
        parses_calls: bool = False,
    ) -> None:
        self.prompts = prompts
        self.model = model
        self.adapters = adapters  # names that may be asked for beside the model's
        self.max_body_bytes = max_body_bytes
        self.bodies = bodies
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._free_threads = asyncio.Semaphore(THREADS)
        self._waiting_bytes = 0
        self._closed = False
        self._told_of_tools = parses_calls

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def body(self, request: Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """The whole body, counted until it is no longer needed; ApiError 413 or 429 once it is known to be too much.

        One that is too large only here is let in and forgotten, so that its client reads why.
        """
        check_coding(request.headers.get("content-encoding", ""))
        declared = declared_size(request.headers.get("content-length", "")) or 0
        _check_size(declared, self.max_body_bytes)
        self.bodies.check(declared)
        limit = self.max_body_bytes if max_bytes is None else min(max_bytes, self.max_body_bytes)
        received = bytearray()
        size = held = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                _check_size(size, self.max_body_bytes)
                if size <= limit:
                    held = self.bodies.claim(size, held)
                    received += piece
            _check_size(size, limit)
            whole = bytes(received)
            received.clear()
            yield whole
        finally:
            self.bodies.release(held)

    async def generation(
        self, request: Request, api: GenerationApi, max_model_len: int, complete: Callable[[Any], None] | None = None
    ) -> ParsedRequest:
        native = (
            None if is_enveloped(request.scope["headers"]) else without_envelope(request.headers.get(PRIORITY_HEADER))
        )
        async with self.body(request) as received:
            return await self.aside(
                request, len(received), lambda: self._parse(received, api, native, max_model_len, complete)
            )

    async def aside(self, request: Request, size: int, work: Callable[[], Read]) -> Read:
        """Run work of this many bytes on a thread; drop it if its client leaves while it waits."""
        if size <= INLINE_BYTES:
            return work()
        # Wait for a thread; raise ApiError 429 if too many requests wait already.
        limit = WAITING_BODIES * self.max_body_bytes
        if self._free_threads.locked() and self._waiting_bytes + size > limit:
            message = f"{self._waiting_bytes} bytes of other requests wait to be read; at most {limit} may: try again"
            raise queue_full(message, 1)
        self._waiting_bytes += size
        try:
            await self._free_threads.acquire()
        finally:
            self._waiting_bytes -= size
        try:
            if self._closed:
                raise draining()
            if await request.is_disconnected():
                raise ClientDisconnect
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._free_threads.release()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model and name not in self.adapters:
            raise unknown_model(name, [self.model, *sorted(self.adapters)])

    def adapter(self, name: str | None) -> str | None:
        """The adapter that this name of a model means."""
        return None if name == self.model else name

    def _parse(
        self,
        received: bytes,
        api: GenerationApi,
        native: Native | None,
        max_model_len: int,
        complete: Callable[[Any], None] | None,
    ) -> ParsedRequest:
        native, body = unwrap(received) if native is None else (native, received)
        if len(body) > MEDIUM_BYTES:
            check_body(body, max_model_len, chat=api.is_chat)
        request, original = api.read(body, complete)
        self.check_model(request.model)
        if isinstance(request, ChatRequest) and request.tools and not self._told_of_tools:
            self._told_of_tools = True
            log.warning(
                "a client sends tools, but the chat template does not tell how the model calls them: calls come as "
                "text; name their format with --tool-call-parser"
            )
        if native.prompts:
            # These are the token ids that the router has made of the prompts.
            is_chat = isinstance(request, ChatRequest)
            expected = 1 if isinstance(request, ChatRequest) else len(request.prompts)
            if len(native.prompts) != expected:
                said = f"prompts has {len(native.prompts)} entries; the request has {expected} prompts"
                raise invalid(said, "prompts")
            for packed in native.prompts:
                check_room(len(packed) // 4, max_model_len, "messages" if is_chat else "prompt")
            token_ids = [unpack_ids(packed) for packed in native.prompts]
            request.prompt_token_ids = token_ids[0] if is_chat else token_ids
        self.prompts.check_resumed(list(map(unpack_ids, native.resume_token_ids)))
        if isinstance(request, ChatRequest):
            prompts = [self.prompts.chat(request, max_model_len)]
            if not native.prompts:
                native.retain = self.prompts.retained(request, prompts[0])
        else:
            prompts = self.prompts.completion(request, max_model_len)
        return ParsedRequest(request, native, prompts, api, original, self.adapter(request.model))


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        message = f"the body has {size} bytes or more; at most {limit} are taken"
        raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
