"""One stream of a gateway, from its first message to its end; what it holds back is bounded by HTTP/2 flow control."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from api.errors import ApiError
from router.picker import wire
from router.picker.exchange import PickedExchange
from router.picker.gateway import Gateway
from router.picker.messages import Message, Refusal, Reply, RequestHeaders, ResponseHeaders
from router.picker.picked import Picked
from router.picker.stream import OutOfOrder, Phase, PickerStream

SILENT_S = 30.0  # while a request comes
LATER_S = 1.0  # than the router gives an answer up, and counts that against the replica


class Conversation:
    def __init__(self, gateway: Gateway, context: Any, first_token_s: float, idle_s: float) -> None:
        self._gateway = gateway
        self._context = context
        self._stream = PickerStream()
        self._exchange: PickedExchange | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._limits_s = {Phase.PICKED: first_token_s + LATER_S, Phase.ANSWERING: idle_s + LATER_S}

    async def run(self) -> None:
        """Answer until the stream is over; a gateway goes on by itself with an answer that the picker leaves."""
        try:
            while self._stream.phase is not Phase.OVER and (message := await self._next()) is not None:
                for reply in await self._replies(message):
                    await self._write(reply)
        except (OutOfOrder, ValueError) as error:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            return
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._exchange is not None:
                self._exchange.leave()

    async def _next(self) -> Message | None:
        """The next message; None at the end. Raises TimeoutError if an answer stops."""
        try:
            async with asyncio.timeout(self._limits_s.get(self._stream.phase, SILENT_S)):
                reading, self._reading = self._reading, None
                read = await (self._context.read() if reading is None else reading)
        except TimeoutError:
            if self._stream.phase is Phase.ASKING and self._exchange is not None:
                why = f"the request's body stopped for {SILENT_S:g} s; send it again"
                self._exchange.refuse(ApiError(408, why, code="body_timeout"))
                for reply in self._stream.decide(self._exchange.told()):
                    await self._write(reply)
            raise
        return None if read is grpc.aio.EOF else wire.read(read)

    async def _replies(self, message: Message) -> Iterable[Reply | Refusal]:
        replies = self._stream.receive(message)
        exchange = self._hear(message)
        if isinstance(message, ResponseHeaders):
            replies[0].mutation = exchange.added_to_answer()
        if self._stream.phase is Phase.DECIDING and not exchange.decided.is_set():
            await self._until_decided(exchange)
        if self._stream.is_open and exchange.decided.is_set():
            return self._stream.decide(exchange.told())
        return replies

    def _hear(self, message: Message) -> PickedExchange:
        exchange = self._exchange
        if isinstance(message, RequestHeaders):
            exchange = self._exchange = self._gateway.open(message)
            return exchange
        if exchange is None:
            raise OutOfOrder(f"{type(message).__name__} came before the request's headers")
        if isinstance(message, ResponseHeaders) and message.served is not None:
            request = exchange.answerer
            if isinstance(request, Picked):
                request.moved(message.served)
        exchange.hear(message)
        return exchange

    async def _until_decided(self, exchange: PickedExchange) -> None:
        """Wait until the request is placed or refused, or the stream goes on or ends."""
        deciding = asyncio.create_task(exchange.decided.wait())
        self._reading = asyncio.create_task(self._context.read())
        await asyncio.wait({deciding, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        deciding.cancel()

    async def _write(self, reply: Reply | Refusal) -> None:
        async with asyncio.timeout(SILENT_S):
            await self._context.write(wire.written(reply))
