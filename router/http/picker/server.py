"""The picker's gRPC server: external processing for gateways, and the health of this router."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from router.config import RouterConfig
from router.http.picker.conversation import Conversation
from router.http.picker.gateway import Gateway
from router.http.picker.wire import (
    HEALTH_SERVICE,
    MAX_BESIDE_BYTES,
    SERVICE,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingResponse,
)

SERVING, NOT_SERVING = 1, 2
LIVENESS, READINESS = "liveness", "readiness"  # names that the Inference Extension asks by, beside that of the service
PING_MS, PONG_MS = 60_000, 20_000  # a gateway whose machine is lost is noticed
LEAST_PAUSE_MS = 5000  # between pings of a gateway: gRPC's own limit of 300 s would end all streams of one that pings
END_S = 1.0  # open streams have this long to end


class PickerServer:
    def __init__(self, config: RouterConfig, is_ready: Callable[[], bool], gateway: Gateway, listen: str) -> None:
        """Bind the address; raise OSError if that fails. Call it within a running loop."""
        self._config = config
        self._is_ready = is_ready
        self._gateway = gateway
        limits = gateway.limits
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=limits.connections + limits.spare_connections,  # the others are for probes
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_body_bytes + MAX_BESIDE_BYTES),
                ("grpc.max_send_message_length", config.max_body_bytes + MAX_BESIDE_BYTES),
                ("grpc.keepalive_time_ms", PING_MS),
                ("grpc.keepalive_timeout_ms", PONG_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PAUSE_MS),
            ],
        )
        process = grpc.stream_stream_rpc_method_handler(self._process, None, ProcessingResponse.SerializeToString)
        health = HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        check = grpc.unary_unary_rpc_method_handler(self._check, *health)
        services = {SERVICE: {"Process": process}, HEALTH_SERVICE: {"Check": check}}
        handlers = [grpc.method_handlers_generic_handler(*service) for service in services.items()]
        self._server.add_generic_rpc_handlers(handlers)
        try:
            if config.tls_cert is None or config.tls_key is None:
                port = self._server.add_insecure_port(listen)
            else:
                pair = Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()
                port = self._server.add_secure_port(listen, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            raise OSError(f"cannot listen on {listen}; choose another --picker-listen") from None
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(END_S)

    async def _process(self, _: Any, context: Any) -> None:
        config, gateway = self._config, self._gateway
        gateway.streams += 1
        try:
            await Conversation(gateway, context, config.first_token_timeout_s, config.idle_timeout_s).run()
        finally:
            gateway.streams -= 1

    async def _check(self, request: Any, context: Any) -> Any:
        service = request.service
        if service not in ("", LIVENESS, READINESS, SERVICE):
            known = f"{LIVENESS}, {READINESS} or {SERVICE}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service is {service[:100]!r}; ask for {known}")
        return HealthCheckResponse(status=SERVING if service == LIVENESS or self._is_ready() else NOT_SERVING)
