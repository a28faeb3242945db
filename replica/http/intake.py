"""Reads a request: bytes within the limit, the router's additions, the client's JSON, token ids."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, TypeVar

from starlette.requests import Request

from api.errors import ApiError, invalid, unknown_model
from api.native import REQUEST_TYPE, Native, unpack_ids, unwrap
from api.prompts import Prompts
from api.requests import ChatRequest, CompletionRequest, read

INLINE_BYTES = 8192  # a longer body is read on a thread: its milliseconds are not taken from other clients' streams

GenerationRequest: TypeAlias = CompletionRequest | ChatRequest
Read = TypeVar("Read")


class Intake(NamedTuple):
    request: GenerationRequest
    native: Native
    prompts: list[list[int]]


class Reader:
    """Owns the threads that read long requests."""

    def __init__(self, prompts: Prompts, model: str, max_body_bytes: int) -> None:
        self.prompts = prompts
        self.model = model
        self.max_body_bytes = max_body_bytes
        self._threads = ThreadPoolExecutor(2, "tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def body(self, request: Request) -> bytes:
        """The whole body; ApiError 413 as soon as it is known to be too large."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._check_size(int(declared))
        received = bytearray()
        async for piece in request.stream():
            received += piece
            self._check_size(len(received))
        return bytes(received)

    async def generation(self, request: Request, request_type: type[GenerationRequest]) -> Intake:
        body = await self.body(request)
        native = Native()
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == REQUEST_TYPE:
            native, body = unwrap(body)
        return await self.aside(len(body), lambda: self._intake(read(body, request_type), native))

    async def aside(self, size: int, work: Callable[[], Read]) -> Read:
        """Does work of this many bytes where it holds up nobody."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise unknown_model(name, [self.model])

    def _intake(self, request: GenerationRequest, native: Native) -> Intake:
        self.check_model(request.model)
        if native.prompts:
            request.prompt_token_ids = _routed_prompts(request, native)
        if native.resume_token_ids:
            request.resume_token_ids = [unpack_ids(packed) for packed in native.resume_token_ids]
        if isinstance(request, ChatRequest):
            return Intake(request, native, [self.prompts.chat(request)])
        return Intake(request, native, self.prompts.completion(request))

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            message = f"the body has {size} bytes or more; at most {self.max_body_bytes} are taken"
            raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _routed_prompts(request: GenerationRequest, native: Native) -> list[list[int]] | list[int]:
    """The token ids that the router has made of the prompts."""
    expected = 1 if isinstance(request, ChatRequest) else len(request.prompts)
    if len(native.prompts) != expected:
        raise invalid(f"prompts has {len(native.prompts)} entries; the request has {expected} prompts", "prompts")
    token_ids = [unpack_ids(packed) for packed in native.prompts]
    return token_ids[0] if isinstance(request, ChatRequest) else token_ids
