"""One stream of a gateway, from its first message to its end; what it holds back is bounded by HTTP/2 flow control."""

from math import inf

from api.errors import ApiError
from router.config import RouterConfig
from router.http.picker import wire
from router.http.picker.exchange import PickedExchange, refusal
from router.http.picker.gateway import Gateway
from router.http.picker.http2 import INVALID_ARGUMENT, LATER_S, Call, Http2Connection
from router.http.picker.stream import Mode, OutOfOrder, Phase, PickerStream, RequestHeaders, ResponseHeaders
from router.proxy.exchange import too_large


class Conversation(Call):
    """A gateway goes on by itself with an answer that the picker leaves.

    Replicas have the same limits; the router gives an answer up, and counts that against the replica, `LATER_S` before.
    """

    def __init__(self, connection: Http2Connection, stream: int, gateway: Gateway, config: RouterConfig) -> None:
        super().__init__(connection, stream)
        self._gateway, self._config = gateway, config
        self._stream = PickerStream()
        self._exchange: PickedExchange | None = None
        self._body_until_s = 0.0
        gateway.streams += 1

    def receive(self, message: bytes) -> None:
        try:
            heard = wire.read(message)
            replies, exchange = self._stream.receive(heard), self._exchange
            if isinstance(heard, RequestHeaders):
                self._body_until_s = self.connection.loop.time() + self._gateway.limits.whole_body_s
                self._exchange = self._gateway.open(heard)
                self._exchange.on_decided = self._decide
            elif exchange is not None:
                exchange.hear(heard)
                if isinstance(heard, ResponseHeaders):
                    replies[0].mutation = exchange.changed_in_answer(heard.headers)
        except (OutOfOrder, ValueError) as error:
            if self._stream.is_open:
                self._refuse(ApiError(400, f"a message of the gateway cannot be taken: {error}", code="bad_message"))
            else:
                self.finish(INVALID_ARGUMENT, str(error))
            return
        if not self._decide() and replies:
            self.write(map(wire.written, replies))
        self._extend()

    def _decide(self) -> bool:
        """Tell the gateway the outcome, if it is there and has not been told."""
        exchange, stream = self._exchange, self._stream
        if exchange is None or exchange.outcome is None or not stream.is_open:
            return False
        self.write(map(wire.written, stream.decide(exchange.told())))
        self._extend()
        return True

    def leave(self) -> None:
        self._gateway.streams -= 1
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()

    def too_late(self) -> None:
        if self._stream.phase is Phase.ASKING:
            limits = self._gateway.limits
            why = f"the request's body stopped for {limits.body_s:g} s, or took more than {limits.whole_body_s:g} s"
            self._refuse(ApiError(408, f"{why}; send it again, at once", code="body_timeout"))
        else:
            self.finish()

    def too_long(self, size: int) -> None:
        if self._stream.is_open:
            self._refuse(too_large(size, self.connection.max_message_bytes))
        else:
            super().too_long(size)

    def _refuse(self, error: ApiError) -> None:
        """Refuse a request that is not decided, lest the gateway let it pass."""
        exchange = self._exchange
        if exchange is not None:
            exchange.on_decided = None
            exchange.refuse(error)  # unless it is refused already
        outcome = refusal(error) if exchange is None else exchange.told()
        self.write(map(wire.written, self._stream.decide(outcome)))
        self.finish()

    def _extend(self) -> None:
        """Set the time for the next message, or end the call after the last one."""
        limits, exchange = self._gateway.limits, self._exchange
        now_s = self.connection.loop.time()
        match self._stream.phase:
            case Phase.OVER:
                self.finish()
            case Phase.ASKING:
                is_whole = exchange is not None and exchange.asked.request_mode == Mode.BUFFERED
                self.until_s = min(now_s + (inf if is_whole else limits.body_s), self._body_until_s)
            case Phase.PICKED:
                self.until_s = now_s + self._config.first_token_timeout_s + LATER_S
            case Phase.ANSWERING if exchange is not None and exchange.is_watched:
                self.until_s = now_s + self._config.idle_timeout_s + LATER_S
            case _:
                self.until_s = inf  # the router decides first, or the answer is not shown
