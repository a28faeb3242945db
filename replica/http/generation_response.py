"""The response to one generation request: submit it, turn the engine's outputs into bytes, notice a client that leaves.

`GenerationResponse._take` and what it calls is the only code of the HTTP process that runs for every token.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, invalid, queue_full, too_long
from api.http.responses import JSON_TYPE
from api.native import CACHED_TOKENS_HEADER, CONTENT_TYPE_HEADER, FRAMES_TYPE, encode_frame, encode_use
from api.responses import CONTENT_TYPE as SSE_TYPE
from replica.http.engine_client import EngineClient, EngineDied, EngineRefused, NoRoom, OutputStream
from replica.http.errors import unavailable
from replica.http.forms import Form
from replica.http.generation import Choice
from replica.http.metrics import Metrics
from replica.http.work import Work
from replica.messages import Output, Submit


@dataclass(slots=True, eq=False)
class RunningChoice:
    choice: Choice
    submit: Submit
    finished: bool = False
    first_s: float = 0.0  # 0: no token yet
    last_s: float = 0.0


class GenerationResponse(Response):
    """An ASGI response; it releases everything that the request holds."""

    def __init__(
        self, work: Work, engine: EngineClient, form: Form, metrics: Metrics, *, framed: bool, arrived_s: float
    ) -> None:
        # Not Response's own __init__: that makes headers of a body, which is not known yet.
        self.status_code = 200
        self.background = None
        self._work = work
        self._engine = engine
        self._form = form
        self._metrics = metrics
        self._framed = framed  # a router asked for native frames
        self._client_left = False
        self._arrived_s = arrived_s  # a time of time.perf_counter
        self._output_stream: OutputStream
        self._running = {
            part.submit.id: RunningChoice(part.choice, part.submit) for part in work.parts if part.submit is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        submits = [part.submit for part in self._work.parts if part.submit is not None]
        self._output_stream = self._engine.submit(submits, whole=not self._work.request.stream)
        self._metrics.open_requests += 1
        watcher = asyncio.create_task(self._watch_client(receive))
        try:
            await self._respond(send)
        finally:
            watcher.cancel()
            self._output_stream.close()
            self._metrics.open_requests -= 1
            self._metrics.client_disconnects += self._client_left
            unfinished = sum(not running.finished for running in self._running.values())
            self._metrics.finished["abort" if self._client_left else "error"] += unfinished

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        self._output_stream.close()

    async def _respond(self, send: Send) -> None:
        try:
            outputs = await self._output_stream.next()
            if not (self._work.request.stream or self._framed):
                while outputs:
                    self._take_all(outputs)
                    outputs = await self._output_stream.next()
        except (EngineDied, EngineRefused, NoRoom) as failure:
            if isinstance(failure, EngineRefused):
                self._running.clear()  # none of them has ever run
            raise self._api_error(failure) from None
        if self._client_left:
            return
        self._metrics.choices.observe(self._work.request.n)
        if self._work.request.stream or self._framed:
            await self._stream(outputs, send)
            return
        body = await self._end()
        headers = [
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            (CACHED_TOKENS_HEADER.encode(), b"%d" % self._form.cached_tokens_of_first()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, outputs: list[Output], send: Send) -> None:
        payload = self._take_all(outputs)
        content_type = SSE_TYPE if self._work.request.stream else JSON_TYPE
        headers = [
            (b"content-type", (FRAMES_TYPE if self._framed else content_type).encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the events
            (CACHED_TOKENS_HEADER.encode(), b"%d" % self._form.cached_tokens_of_first()),
        ]
        if self._framed:
            headers.append((CONTENT_TYPE_HEADER.encode(), content_type.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while not self._output_stream.complete:
                if payload:
                    await send({"type": "http.response.body", "body": payload, "more_body": True})
                payload = self._take_all(await self._output_stream.next())
        except (EngineDied, NoRoom) as failure:
            if self._framed and (isinstance(failure, EngineDied) or not self._work.request.stream):
                return  # the connection is cut, and the router resumes the answer elsewhere
            payload = self._form.broken(self._api_error(failure))
            payload = encode_frame(0, (), payload) if self._framed else payload
        else:
            last = await self._end()
            payload += encode_frame(0, (), last) if self._framed and last else last
        if not self._client_left:
            await send({"type": "http.response.body", "body": payload})

    def _take_all(self, outputs: Sequence[Output]) -> bytes:
        now_s = time.perf_counter()
        return b"".join([self._take(output, now_s) for output in outputs])

    def _take(self, output: Output, now_s: float) -> bytes:
        running = self._running[output.id]
        choice = running.choice
        if running.finished:
            return b""  # sampled before the engine heard of the stop string
        figures = b""
        delta = choice.feed(output.token_ids, output.finish_reason, output.logprobs or ())
        if running.first_s:
            self._metrics.between_tokens_s.observe(now_s - running.last_s)
        else:
            self._metrics.first_token_s.observe(now_s - self._arrived_s)
            self._metrics.choice_begun(len(running.submit.prompt) // 4, running.submit.sampling.max_tokens)
            running.first_s = now_s
            self._form.begin(choice, output.cached_tokens)
            if self._work.tells_use:  # the router wants to know the price of the prompt, which is found cached once
                cached = 0 if choice.index % self._work.request.n else output.cached_tokens
                figures = encode_use(len(running.submit.prompt) // 4 - output.cached_tokens, cached)
            if running.submit.sampling.prompt_logprobs is not None:
                self._form.tell_prompt(choice, output.prompt_logprobs or ())
        running.last_s = now_s
        self._metrics.tokens_generated += len(delta.token_ids)
        if choice.finish_reason is not None:
            running.finished = True
            if output.finish_reason is None:
                self._output_stream.cancel(output.id)  # a stop string: the engine does not know
            self._metrics.choice_finished(
                choice.finish_reason,
                tokens=choice.completion_tokens,
                arrived_s=self._arrived_s,
                first_s=running.first_s,
                last_s=running.last_s,
            )
        payload = self._form.add(choice, delta)
        return figures + encode_frame(choice.index, delta.token_ids, payload) if self._framed else payload

    async def _end(self) -> bytes:
        for _ in self._form.prepare():
            await asyncio.sleep(0)
        return self._form.end()

    def _api_error(self, failure: EngineDied | EngineRefused | NoRoom) -> ApiError:
        if isinstance(failure, EngineDied):
            return unavailable("the engine stopped; try again, another server may answer", "engine_died")
        if isinstance(failure, NoRoom):
            return invalid(str(failure)) if failure.alone else queue_full(str(failure), 1)
        match failure.reason:
            case "full":
                return queue_full(failure.message, failure.retry_after_s)
            case "too_long":
                return too_long(failure.message)
        return invalid(failure.message)
