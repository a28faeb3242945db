"""The picker's gRPC server: external processing for gateways, and the health of this router."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from google.protobuf.message import DecodeError

from api.http.server import BACKLOG, SWEEP_S, listen, tls_context
from router.config import RouterConfig
from router.http.picker import http2
from router.http.picker.conversation import Conversation
from router.http.picker.gateway import Gateway
from router.http.picker.http2 import Call, Http2Connection
from router.http.picker.wire import HEALTH_SERVICE, MAX_BESIDE_BYTES, SERVICE, HealthCheckRequest, HealthCheckResponse

PROCESS, CHECK = (f"/{name}".encode() for name in (f"{SERVICE}/Process", f"{HEALTH_SERVICE}/Check"))
SERVING, NOT_SERVING = 1, 2
LIVENESS, READINESS = "liveness", "readiness"  # names that the Inference Extension asks by, beside that of the service
END_S = 1.0  # open streams have this long to end
LOOK_S = 0.01


class PickerServer:
    def __init__(self, config: RouterConfig, is_ready: Callable[[], bool], gateway: Gateway, at: str) -> None:
        """Bind the address; raise OSError if that fails. Call it within a running loop."""
        self._config = config
        self._is_ready = is_ready
        self._gateway = gateway
        host, _, port = at.rpartition(":")
        self._tls = None if config.tls_cert is None else tls_context(config.tls_cert, config.tls_key)
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        try:
            self._listener = listen(host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            raise OSError(f"cannot listen on {at}: {error}; choose another --picker-listen") from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._connections: dict[Http2Connection, None] = {}
        self._serving: asyncio.Task[None] | None = None

    def _open(self, connection: Http2Connection, stream: int, path: bytes) -> Call:
        gateway = self._gateway
        if gateway.streams >= gateway.limits.connections + gateway.limits.spare_connections:  # those are for probes
            refusal = http2.RESOURCE_EXHAUSTED, f"{gateway.streams:,} streams are open; try again"
        elif path == PROCESS:
            return Conversation(connection, stream, gateway, self._config)
        elif path == CHECK:
            return Check(connection, stream, gateway, self._is_ready)
        else:
            refusal = http2.UNIMPLEMENTED, f"{path[:30]!r} is not served; ask {SERVICE}/Process"
        call = Call(connection, stream)
        call.finish(*refusal)
        return call

    async def start(self) -> None:
        loop, most = asyncio.get_running_loop(), self._config.max_body_bytes + MAX_BESIDE_BYTES
        connect = partial(Http2Connection, self._connections, self._open, self._gateway.limits, most)
        server = await loop.create_server(connect, sock=self._listener, ssl=self._tls, backlog=BACKLOG)

        async def serve() -> None:
            try:
                while True:
                    await asyncio.sleep(SWEEP_S)
                    for connection in list(self._connections):
                        connection.sweep(loop.time())
            finally:
                server.close()

        self._serving = loop.create_task(serve())

    async def close(self) -> None:
        if self._serving is None:
            self._listener.close()
        else:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        for connection in list(self._connections):
            connection.retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while self._connections:
                    await asyncio.sleep(LOOK_S)
        for connection in list(self._connections):
            connection.transport.abort()


class Check(Call):
    """A question after this router's health."""

    def __init__(
        self, connection: Http2Connection, stream: int, gateway: Gateway, is_ready: Callable[[], bool]
    ) -> None:
        super().__init__(connection, stream)
        self._gateway, self._is_ready = gateway, is_ready
        gateway.streams += 1

    def receive(self, message: bytes) -> None:
        try:
            service = HealthCheckRequest.FromString(message).service
        except DecodeError as error:
            self.finish(http2.INVALID_ARGUMENT, f"the message cannot be decoded: {error}")
            return
        if service not in ("", LIVENESS, READINESS, SERVICE):
            known = f"{LIVENESS}, {READINESS} or {SERVICE}"
            self.finish(http2.NOT_FOUND, f"service is {service[:100]!r}; ask for {known}")
            return
        status = SERVING if service == LIVENESS or self._is_ready() else NOT_SERVING
        self.write([HealthCheckResponse(status=status).SerializeToString()])
        self.finish()

    def leave(self) -> None:
        self._gateway.streams -= 1
