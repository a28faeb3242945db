"""One stream of a gateway, from its first message to its end; what it holds back is bounded by HTTP/2 flow control."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc

from api.errors import ApiError
from router.http.picker import wire
from router.http.picker.exchange import PickedExchange, moved, refusal
from router.http.picker.gateway import Gateway
from router.http.picker.stream import (
    Mode,
    Outcome,
    OutOfOrder,
    Phase,
    PickerStream,
    Refusal,
    Reply,
    RequestHeaders,
    ResponseHeaders,
)
from router.proxy.request import Request

LATER_S = 1.0  # than the router gives an answer up, and counts that against the replica


class Conversation:
    def __init__(self, gateway: Gateway, context: Any, first_token_s: float, idle_s: float) -> None:
        self._gateway = gateway
        self._context = context
        self._stream = PickerStream()
        self._exchange: PickedExchange | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._limits_s = {Phase.PICKED: first_token_s + LATER_S, Phase.ANSWERING: idle_s + LATER_S}
        self._body_until_s = 0.0
        self._too_slow = ""
        self._deadline = asyncio.timeout(gateway.limits.head_s)  # the time for the next message, and the replies to it

    async def run(self) -> None:
        """Answer until the stream is over; a gateway goes on by itself with an answer that the picker leaves."""
        try:
            async with self._deadline:
                while self._stream.phase is not Phase.OVER and await self._answer_next():
                    self._extend()
        except TimeoutError:
            if self._stream.phase is Phase.ASKING:
                why = f"the request's body {self._too_slow}; send it again, at once"
                await self._refuse(ApiError(408, why, code="body_timeout"))
        except (OutOfOrder, ValueError) as error:
            if not self._stream.is_open:
                await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            await self._refuse(ApiError(400, f"a message of the gateway cannot be taken: {error}", code="bad_message"))
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._exchange is not None:
                self._exchange.leave()

    async def _answer_next(self) -> bool:
        """Answer the next message; return False at the end. Nothing of it is kept: a body may be large."""
        reading, self._reading = self._reading, None
        replies = self._take(await (self._context.read() if reading is None else reading))
        if replies is None:
            return False
        exchange = self._exchange
        if exchange is not None and self._stream.is_open:
            if self._stream.phase is Phase.DECIDING and not exchange.decided.is_set():
                # The request may wait as long as the router lets it, until it is decided or the stream goes on or ends.
                self._deadline.reschedule(None)
                deciding = asyncio.create_task(exchange.decided.wait())
                self._reading = asyncio.create_task(self._context.read())
                await asyncio.wait({deciding, self._reading}, return_when=asyncio.FIRST_COMPLETED)
                deciding.cancel()
                self._extend()
            if exchange.decided.is_set():
                await self._write(self._stream.decide(exchange.told()))
                return True
        await self._write(replies)
        return True

    async def _write(self, replies: Iterable[Reply | Refusal]) -> None:
        for reply in replies:
            await self._context.write(wire.written(reply))

    def _take(self, read: Any) -> list[Reply] | None:
        if read is grpc.aio.EOF:
            return None
        message = wire.read(read)
        replies = self._stream.receive(message)
        if isinstance(message, RequestHeaders):
            self._body_until_s = asyncio.get_running_loop().time() + self._gateway.limits.whole_body_s
            self._exchange = self._gateway.open(message)
            return replies
        exchange = self._exchange
        if exchange is None:
            raise OutOfOrder(f"{type(message).__name__} came before the request's headers")
        if isinstance(message, ResponseHeaders):
            if message.served is not None and isinstance(exchange.answerer, Request):
                exchange.guard(moved, exchange.answerer, message.served)
            exchange.hear(message)
            replies[0].mutation = exchange.changed_in_answer(message.headers)
        else:
            exchange.hear(message)
        return replies

    # ---- time

    def _extend(self) -> None:
        limits, exchange, now_s = self._gateway.limits, self._exchange, asyncio.get_running_loop().time()
        if self._stream.phase is not Phase.ASKING:
            limit_s = self._limits_s.get(self._stream.phase, limits.body_s)
            is_last = self._stream.phase is Phase.ANSWERING and exchange is not None and not exchange.is_watched
            self._deadline.reschedule(None if is_last else now_s + limit_s)
            return
        # The body has to go on, or be complete; one that the gateway buffers comes at once.
        is_buffered = exchange is not None and exchange.asked.request_mode == Mode.BUFFERED
        if is_buffered or now_s + limits.body_s > self._body_until_s:
            self._too_slow = f"was not complete within {limits.whole_body_s:g} s"
            self._deadline.reschedule(self._body_until_s)
        else:
            self._too_slow = f"stopped for {limits.body_s:g} s"
            self._deadline.reschedule(now_s + limits.body_s)

    async def _refuse(self, error: ApiError) -> None:
        """Refuse a request that is not decided, lest the gateway let it pass."""
        outcome: Outcome = refusal(error)
        if self._exchange is not None:
            self._exchange.refuse(error)  # unless it is refused already
            outcome = self._exchange.told()
        with suppress(TimeoutError):
            async with asyncio.timeout(LATER_S):
                await self._write(self._stream.decide(outcome))
