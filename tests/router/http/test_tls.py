"""Clients and gateways that speak TLS: to them the front is the same."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc

from tests.router.http.picker.asking import Gateway, asked
from tests.router.loopback import certificate, with_openssl
from tests.router.scripted import Script, says, served


@with_openssl
async def test_clients_and_gateways_trust_one_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=cert)
    tls: dict[str, Any] = {"tls_cert": str(cert), "tls_key": str(key), "picker_listen": "127.0.0.1:0"}
    async with served(*Script(says(b"whole")).replicas(1), **tls) as running:
        for path, expected in (("/health", b'{"status":"ok"}'), ("/v1/responses/7", b"whole")):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=trusting)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert expected in answer
        assert running.front.picker is not None
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(running.front.picker.address, credentials) as channel:
            stream = Gateway(channel).stream()
            await stream.begin(asked())
            assert await stream.picked()
            await stream.answer()
