"""Tries as another user of the machine what can be done to a fleet: `python -m tests.hostile.nobody` becomes that user.

Reads a Target as JSON on stdin, and prints what it could do, a list of JSON strings. It has to be started by root.
"""

import encodings.idna  # noqa: F401  -- of sockets; this user cannot read it later
import http.client as http_client
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator

import msgspec

NOBODY = 65534
MAX_BYTES = 2**20
ANSWER_WITHIN_S = 0.3  # event sockets say nothing to HTTP


class Target(msgspec.Struct):
    owner: int  # the fleet's user
    since_s: float  # nothing older was made by the fleet
    folders: list[str]  # where other users have their files, too
    paths: list[str]  # files that its processes have open, and their folders
    sockets: list[str]  # as in /proc/net/unix; an abstract one begins with @
    pids: list[int]
    secrets: list[str]
    ports: list[int] = []


def attempts(target: Target) -> list[str]:
    """Try it all as another user; return what could be done."""
    told = subprocess.run(
        [sys.executable, "-m", __name__], input=msgspec.json.encode(target), stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(told.stdout, type=list[str])


def _found(target: Target) -> Iterator[str]:
    for path in sorted({*target.paths, *_below(target)}):
        yield from _of_path(path, target.secrets)
    for path in target.sockets:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path.replace("@", "\0", 1))
            except OSError:
                continue
        yield f"connect to {path}"
    for port in target.ports:
        yield from _asked(port)
    for pid in target.pids:
        for name in "environ", "cmdline", "maps":
            yield from _read(f"/proc/{pid}/{name}", target.secrets)


def _asked(port: int) -> Iterator[str]:
    """Ask without a key for what ends a server, and for what runs a program in Ray's agent of runtime environments."""
    for path in "/get_or_create_runtime_env", "/end":
        http = http_client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_WITHIN_S)
        try:
            http.request("POST", path, b"{}")
            status = http.getresponse().status
        except (OSError, http_client.HTTPException):  # no HTTP, or HTTP/2 alone
            return
        finally:
            http.close()
        if status < 400 or status >= 500:
            yield f"POST {path} at port {port}: {status}"


def _below(target: Target) -> Iterator[str]:
    """Yield what is the owner's, and new, of everything that this user can see."""
    for root in target.folders:
        for folder, folders, files in os.walk(root):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                try:
                    found = os.lstat(path)
                except OSError:
                    continue
                if found.st_uid == target.owner and max(found.st_mtime, found.st_ctime) >= target.since_s:
                    yield path


def _of_path(path: str, secrets: list[str]) -> Iterator[str]:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):  # what it leads to counts
        return
    if os.access(path, os.W_OK):
        yield f"write to {path}"
    if stat.S_ISDIR(mode) and not mode & stat.S_ISVTX:
        try:
            os.symlink("/etc/passwd", os.path.join(path, "planted"))
        except OSError:
            pass
        else:
            os.unlink(os.path.join(path, "planted"))
            yield f"plant a link in {path}"
    if stat.S_ISREG(mode):
        yield from _read(path, secrets)


def _read(path: str, secrets: list[str]) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES)
    except OSError:
        return
    for secret in secrets:
        if secret.encode() in content:
            yield f"read {secret!r} in {path}"


def main() -> None:
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    sys.stdout.buffer.write(msgspec.json.encode(list(_found(target))))


if __name__ == "__main__":
    main()
