"""A gateway that asks by TLS."""

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.router.http.picker.asking import Gateway, asked
from tests.router.scripted import named, served

OPENSSL = shutil.which("openssl")


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificate")
async def test_the_picker_has_the_routers_certificate(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"{OPENSSL} req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=h -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    listen = {"picker_listen": "127.0.0.1:0", "tls_cert": str(cert), "tls_key": str(key)}
    async with served(named("one"), ready=True, **listen) as running:
        assert running.front.picker is not None
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(running.front.picker.address, credentials) as channel:
            stream = Gateway(channel).stream()
            await stream.begin(asked())
            assert await stream.picked()
            await stream.answer()
