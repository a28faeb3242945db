"""The picker's gRPC server: external processing for gateways, and the health of this router."""

from pathlib import Path
from typing import Any

import grpc

from router.core import Router
from router.picker.conversation import Conversation
from router.picker.gateway import Gateway
from router.picker.schema import (
    HEALTH_SERVICE,
    SERVICE,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from router.status import not_ready

SERVING, NOT_SERVING = 1, 2
LIVENESS, READINESS = "liveness", "readiness"  # names that the Inference Extension asks by, beside that of the service
BESIDE_BYTES = 128 * 1024  # of a message, in addition to a whole body
END_S = 1.0  # for streams that are still open


class PickerServer:
    def __init__(self, router: Router, gateway: Gateway, listen: str) -> None:
        """Bind the address; raise OSError if that fails. Call it within a running loop."""
        self._router = router
        self._gateway = gateway
        config = router.config
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=config.max_connections,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_body_bytes + BESIDE_BYTES),
                ("grpc.max_send_message_length", config.max_body_bytes + BESIDE_BYTES),
            ],
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        self.address = f"{listen.rpartition(':')[0]}:{self._bind(listen)}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(END_S)

    def _bind(self, listen: str) -> int:
        config = self._router.config
        try:
            if config.tls_cert is None or config.tls_key is None:
                port: int = self._server.add_insecure_port(listen)
            else:
                pair = Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()
                port = self._server.add_secure_port(listen, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            raise OSError(f"cannot listen on {listen}; choose another --picker-listen") from None
        return port

    def _handlers(self) -> tuple[Any, ...]:
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        return (
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check}),
        )

    async def _process(self, _: Any, context: Any) -> None:
        config = self._router.config
        await Conversation(self._gateway, context, config.first_token_timeout_s, config.idle_timeout_s).run()

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service == LIVENESS:
            return HealthCheckResponse(status=SERVING)
        if request.service not in ("", READINESS, SERVICE):
            known = f"{LIVENESS}, {READINESS} or {SERVICE}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service is {request.service[:100]!r}; ask for {known}")
        ready = not self._router.leaving and not_ready(self._router) is None
        return HealthCheckResponse(status=SERVING if ready else NOT_SERVING)
