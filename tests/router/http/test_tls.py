"""Clients that speak TLS: to them the front is the same."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.router.scripted import Script, says, served

OPENSSL = shutil.which("openssl")


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificate")
async def test_a_router_with_a_certificate_answers_both_kinds_of_routes(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"{OPENSSL} req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=h -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=cert)
    async with served(*Script(says(b"whole")).replicas(1), tls_cert=str(cert), tls_key=str(key)) as running:
        for path, expected in (("/health", b'{"status":"ok"}'), ("/v1/responses/7", b"whole")):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=trusting)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert expected in answer
