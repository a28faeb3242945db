"""CURVE keys: encrypts event sockets and lets in only known clients.

Key files are ZeroMQ certificates; `warmroute events keygen NAME` writes a pair, the secret one with mode 0600.
"""

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from msgspec import Struct

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

MAX_BYTES = 4096  # a key file has some hundred


class CurveKeys(Struct, frozen=True):
    """The server's side: its own keys, and the folder of the public keys it lets in (None: any client).

    `shared`: only clients with these same keys are let in.
    """

    public: bytes
    secret: bytes
    clients: str | None = None
    shared: bool = False

    def authenticator(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "ThreadAuthenticator":
        from zmq.auth.thread import ThreadAuthenticator  # it imports asyncio and more; most publishers need neither

        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        if self.shared:
            only_ours = SimpleNamespace(callback=lambda domain, key: key == self.public)  # noqa: ARG005
            authenticator.configure_curve_callback("*", only_ours)
        else:
            authenticator.configure_curve(domain="*", location=self.clients or zmq.auth.CURVE_ALLOW_ANY)
        return authenticator


class CurveClient(Struct, frozen=True):
    """The client's side: the server's public key, and its own keys."""

    server: bytes
    public: bytes
    secret: bytes


def load_curve(secret_file: str, clients: str | None = None) -> CurveKeys:
    public, secret = _load_pair(secret_file)
    if clients is not None and not Path(clients).is_dir():
        raise ValueError(f"{clients} is not a folder of client keys (*.key)")
    return CurveKeys(public, secret, clients)


def shared_keys(secret_file: str) -> CurveKeys:
    """The keys of both sides, which let in each other and nobody else."""
    keys = load_curve(secret_file)
    return CurveKeys(keys.public, keys.secret, shared=True)


def load_curve_client(server_file: str, secret_file: str) -> CurveClient:
    return CurveClient(_load(server_file)[0], *_load_pair(secret_file))


def secure_server(socket: "zmq.Socket[bytes]", curve: CurveKeys) -> None:
    socket.curve_publickey, socket.curve_secretkey = curve.public, curve.secret
    socket.curve_server = True


def secure_client(socket: "zmq.Socket[bytes]", curve: CurveClient) -> None:
    socket.curve_publickey, socket.curve_secretkey = curve.public, curve.secret
    socket.curve_serverkey = curve.server


def write_keys(name: str) -> tuple[Path, Path]:
    """Write NAME.key (public) and NAME.key_secret."""
    path = Path(name)
    for taken in (path.with_name(f"{path.name}.key"), path.with_name(f"{path.name}.key_secret")):
        if taken.exists():
            raise ValueError(f"{taken} already exists; keys are never overwritten")
    before = os.umask(0o077)
    try:
        public, secret = zmq.auth.create_certificates(path.parent, path.name)
    finally:
        os.umask(before)
    return Path(public), Path(secret)


def _load_pair(file: str) -> tuple[bytes, bytes]:
    public, secret = _load(file)
    if secret is None:
        raise ValueError(f"{file} has no secret key; name the .key_secret file")
    return public, secret


def _load(file: str) -> tuple[bytes, bytes | None]:
    try:
        # A pipe would be waited for, and some devices never end.
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise ValueError(f"not a regular file of at most {MAX_BYTES} bytes; use `events keygen`")
        return zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a CURVE key file: {error}") from error
