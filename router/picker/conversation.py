"""One stream of a gateway, from its first message to its end; what it holds back is bounded by HTTP/2 flow control."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
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
        self._deadline = asyncio.timeout(SILENT_S)  # for the next message, and the replies to it

    async def run(self) -> None:
        """Answer until the stream is over; a gateway goes on by itself with an answer that the picker leaves."""
        try:
            async with self._deadline:
                await self._answer_all()
        except TimeoutError:
            await self._refuse_half()
        except (OutOfOrder, ValueError) as error:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._exchange is not None:
                self._exchange.leave()

    async def _answer_all(self) -> None:
        while self._stream.phase is not Phase.OVER and (message := await self._next()) is not None:
            for reply in await self._replies(message):
                await self._context.write(wire.written(reply))
            self._extend()

    async def _next(self) -> Message | None:
        """The next message; None at the end."""
        reading, self._reading = self._reading, None
        read = await (self._context.read() if reading is None else reading)
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
        if isinstance(message, RequestHeaders):
            self._exchange = self._gateway.open(message)
            return self._exchange
        exchange = self._exchange
        if exchange is None:
            raise OutOfOrder(f"{type(message).__name__} came before the request's headers")
        request = exchange.answerer
        if isinstance(message, ResponseHeaders) and message.served is not None and isinstance(request, Picked):
            request.moved(message.served)
        exchange.hear(message)
        return exchange

    async def _until_decided(self, exchange: PickedExchange) -> None:
        """Wait, as long as the router lets the request wait, until it is decided or the stream goes on or ends."""
        self._deadline.reschedule(None)
        deciding = asyncio.create_task(exchange.decided.wait())
        self._reading = asyncio.create_task(self._context.read())
        await asyncio.wait({deciding, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        deciding.cancel()
        self._extend()

    def _extend(self) -> None:
        limit_s = self._limits_s.get(self._stream.phase, SILENT_S)
        self._deadline.reschedule(asyncio.get_running_loop().time() + limit_s)

    async def _refuse_half(self) -> None:
        """Refuse a request whose body has stopped."""
        if self._stream.phase is not Phase.ASKING or self._exchange is None:
            return
        why = f"the request's body stopped for {SILENT_S:g} s; send it again"
        self._exchange.refuse(ApiError(408, why, code="body_timeout"))
        with suppress(TimeoutError):
            async with asyncio.timeout(LATER_S):
                for reply in self._stream.decide(self._exchange.told()):
                    await self._context.write(wire.written(reply))
