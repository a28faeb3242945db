"""A gateway of few words: it asks a router's picker over gRPC, message by message."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from router.http.picker.wire import CLASSES, HEALTH_SERVICE, SERVICE, ProcessingRequest, ProcessingResponse
from tests.router.scripted import CHAT, DEADLINE_S, MODEL, Served

BUFFERED = {"request_body_mode": 2, "response_body_mode": 1}
DUPLEX = {"request_body_mode": 4, "response_body_mode": 4}


def asked(text: str = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}).encode()


def head(headers: Mapping[str, str], *, end: bool = False) -> dict[str, Any]:
    listed = [{"key": name, "raw_value": value.encode()} for name, value in headers.items()]
    return {"headers": {"headers": listed}, "end_of_stream": end}


class Stream:
    """One request of the gateway."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **fields: Any) -> None:
        await self.call.write(ProcessingRequest(**fields))

    async def reply(self) -> Any:
        """The next reply, by its field; None: the picker has ended the stream."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return None
        [(name, value)] = [(field.name, value) for field, value in response.ListFields() if field.number != 8]
        return name, value, response

    async def head(self, config: Any = DUPLEX, path: str = CHAT, **headers: str) -> None:
        """Send a request's head, which is all that the picker takes of a request that it refuses by it."""
        named = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "gateway", **headers}
        named = {name.replace("_", "-"): value for name, value in named.items()}
        await self.send(request_headers=head(named), protocol_config=config)

    async def begin(self, body: bytes = b"", config: Any = DUPLEX, path: str = CHAT, **headers: str) -> None:
        """Send a whole request, whose head is not refused."""
        await self.head(config, path, **headers)
        if config == BUFFERED:
            await self.reply()
        await self.send(request_body={"body": body, "end_of_stream": True})

    async def picked(self) -> str:
        """The endpoint that is named, once the whole request has come back."""
        name, value, response = await self.reply()
        assert name != "immediate_response", value.body
        endpoint: str = response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
        while name == "request_headers" or (name == "request_body" and not self._is_last(value)):
            name, value, _ = await self.reply()
        return endpoint

    @staticmethod
    def _is_last(value: Any) -> bool:
        mutation = value.response.body_mutation
        return not mutation.HasField("streamed_response") or mutation.streamed_response.end_of_stream

    async def refusal(self) -> tuple[int, Any]:
        name, value, _ = await self.reply()
        assert name == "immediate_response", name
        return value.status.code, json.loads(value.body)["error"]["code"]

    async def answer(self, body: bytes = b"{}", status: str = "200", *, served: str | None = None) -> None:
        """Show a whole answer, of the replica at the address `served` if that is told."""
        message = ProcessingRequest(response_headers=head({":status": status}))
        if served is not None:
            told = message.metadata_context.filter_metadata.add(key="envoy.lb").value
            told.update({"x-gateway-destination-endpoint-served": served})
        await self.call.write(message)
        await self.reply()
        await self.send(response_body={"body": body, "end_of_stream": True})
        await self.reply()

    async def end(self) -> None:
        await self.call.done_writing()


@asynccontextmanager
async def gateway(running: Served) -> AsyncIterator["Gateway"]:
    assert running.front.picker is not None, "picker_listen is set"
    async with grpc.aio.insecure_channel(running.front.picker.address) as channel:
        yield Gateway(channel)


class Gateway:
    def __init__(self, channel: Any) -> None:
        self._process = channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        self.raw_process = channel.stream_stream(f"/{SERVICE}/Process", None, ProcessingResponse.FromString)
        request, response = CLASSES["HealthCheckRequest"], CLASSES["HealthCheckResponse"]
        self._check = channel.unary_unary(f"/{HEALTH_SERVICE}/Check", request.SerializeToString, response.FromString)

    def stream(self) -> Stream:
        return Stream(self._process(timeout=DEADLINE_S))

    async def health(self, service: str = "") -> int:
        response = await self._check(CLASSES["HealthCheckRequest"](service=service))
        status: int = response.status
        return status
