"""The fleets of this machine: `warmroute up` keeps a file for each, so that other commands find its controller.

A broken, stale or forged file is reported and skipped. New fields go last.
"""

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Meta, Struct, field

from fleet.commands.address import example

FOLDER_PREFIX = "warmroute-"  # nothing with another name is ever removed
MOST_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 1.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Port = Annotated[int, Meta(ge=1, le=65535)]
HeaderText = Annotated[str, Meta(pattern=r"\A[!-~]+\Z")]


def _boot() -> str:
    """Identify this boot of the machine: pids and uptimes start again with each."""
    return _read_text(Path("/proc/sys/kernel/random/boot_id")).strip()


def _pid_namespace() -> str:
    """Identify this process's pid namespace: containers may share a temporary folder, but not pids."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class LocalFleet(Struct, frozen=True, kw_only=True):
    port: Port  # of its router
    pid: Annotated[int, Meta(ge=1)]  # of `warmroute up`; in a container it may well be 1
    started: float  # `process_started(pid)`: tells it from a later process with the same pid
    controller: Annotated[str, Meta(pattern="^https?://")]  # its URL
    key: HeaderText | None = None  # of the controller
    folders: tuple[str, ...] = ()  # temporary ones, to be removed should it be killed
    boot: str = field(default_factory=_boot)
    pid_namespace: str = field(default_factory=_pid_namespace)
    ending: bool = False  # whether `warmroute down` has asked it to end: to be asked twice means something else
    found: bool = False  # whether the fleet was there already: it goes on when this process, with its router, ends
    router: Annotated[str, Meta(pattern=r"\A(https?://[!-~]+)?\Z")] = ""  # its URL; empty: at 127.0.0.1

    @property
    def router_url(self) -> str:
        return self.router or f"http://127.0.0.1:{self.port}"


class Where(NamedTuple):
    """A controller, and its fleet if that runs on this machine."""

    url: str
    key: str | None
    local: LocalFleet | None
    routers: tuple[str, ...] = ()  # URLs of its routers on this machine


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LocalFleet).decode
_process_of = attrgetter("pid", "started", "boot", "pid_namespace")


# ---- what `warmroute up` does


def record_fleet(fleet: LocalFleet) -> Path:
    """Write its file, in one piece or not at all; what a killed one on the same port has left is removed before."""
    folder = _first_of_ours()
    path = folder / _file_name(fleet)
    try:
        for before in _read_all(folder, f"{fleet.port}-*.json"):
            if was_killed(before):
                clean_up(before)
        _make_ours(folder)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".")  # with mode 0600
        with open(descriptor, "wb") as file:
            file.write(_encode(fleet))
        os.replace(temporary, path)
        remove_record(fleet, but=path)  # what another session's XDG_RUNTIME_DIR made it write elsewhere
    except OSError as error:
        raise click.ClickException(
            f"cannot write {str(path)!r}: {error.strerror}; set XDG_RUNTIME_DIR to a writable folder"
        ) from error
    return path


def remove_record(fleet: LocalFleet, but: Path | None = None) -> None:
    """Remove its file, also one that cannot be read, and the folder if it is empty."""
    for folder in _folders():
        path = folder / _file_name(fleet)
        try:
            if path == but or not os.path.lexists(path) or not _is_ours(folder) or _is_of_another(path, fleet):
                continue
            path.unlink(missing_ok=True)
        except OSError as error:
            _say(f"{path} cannot be removed: {error.strerror}")
        else:
            with contextlib.suppress(OSError):  # others are in it
                folder.rmdir()


def process_started(pid: int) -> float | None:
    """Return when a process started, in seconds since boot, which no clock change moves; None if it has ended."""
    fields = _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()  # a command's name may have spaces
    if len(fields) < 20 or fields[0] in "ZX":  # a zombie
        return None
    return int(fields[19]) * TICK_S


# ---- what other commands do


def running_fleets() -> list[LocalFleet]:
    """Return the fleets that run; clean up after killed ones, with a note."""
    living = []
    for fleet in recorded_fleets():
        if is_running(fleet):
            living.append(fleet)
        elif was_killed(fleet):
            clean_up(fleet)
            _say(f"the fleet of port {fleet.port} was killed (pid {fleet.pid}); its remains are removed")
            if _answers(fleet.controller):  # in a cluster it needs no `warmroute up`
                _say(f"its controller still answers; end it with: warmroute down {fleet.controller}")
    return sorted(living, key=lambda fleet: (fleet.port, fleet.started))


def find(which: str | None) -> Where:
    """`which` is a URL, of a controller or of the router of a fleet here; a port; or None: the only fleet here."""
    fleets = running_fleets()
    if which is None:
        return _where(_only(fleets), fleets)
    found = _at_port(fleets, int(which)) if which.isdecimal() else _at_url(fleets, which)
    if len(found) > 1:
        raise click.ClickException(
            f"{which} matches several fleets: {listed(found)}; name one by the URL of its controller"
        )
    if not found and which.isdecimal():
        raise click.ClickException(f"no fleet on this machine has port {which}; running: {listed(fleets)}")
    return _where(found[0], fleets) if found else Where(which, None, None)


def listed(fleets: list[LocalFleet]) -> str:
    return ", ".join(f"port {fleet.port} (controller {fleet.controller})" for fleet in fleets) or "none"


def recorded_fleets() -> Iterator[LocalFleet]:
    """Yield every fleet that has a file, running or not."""
    for folder in _folders():
        try:
            fleets = _read_all(folder, "*.json") if _is_ours(folder) else []
        except OSError as error:
            _say(f"{folder} is skipped: {error.strerror or error}")
            continue
        yield from fleets


def is_running(fleet: LocalFleet) -> bool:
    """True if this very process runs; False for one of another container, whose state is not known."""
    here = (fleet.boot, fleet.pid_namespace) == (_boot(), _pid_namespace())
    started = process_started(fleet.pid) if here else None
    return started is not None and abs(started - fleet.started) < TICK_S / 2


def was_killed(fleet: LocalFleet) -> bool:
    return fleet.pid_namespace == _pid_namespace() and not is_running(fleet)


def clean_up(fleet: LocalFleet) -> None:
    """Remove the remains of a killed fleet."""
    for name in fleet.folders:
        folder = Path(name)
        if not (folder.is_absolute() and folder.name.startswith(FOLDER_PREFIX) and ".." not in folder.parts):
            _say(f"{name!r} is left alone: it does not look like a temporary folder of warmroute")
        elif folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
    remove_record(fleet)


# ---- files


def _folders() -> list[Path]:
    """Return the folders of the files, that of new files first. XDG_RUNTIME_DIR may not be set in every session.

    The last is for a user whose temporary folder somebody else has made. Machines may share a home: it names the boot.
    """
    temporary = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{os.geteuid()}"
    at_home = Path(os.path.expanduser("~"), ".cache", "warmroute", f"fleets-{_boot()}")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # One that su and sudo have left in the environment is another user's.
    if os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        return [Path(runtime) / "warmroute", temporary, at_home]
    return [temporary, at_home]


def _first_of_ours() -> Path:
    """Make the first folder that can be this user's alone."""
    folders = _folders()
    for folder in folders:
        try:
            _make_ours(folder)
        except OSError as error:
            if folder == folders[-1]:
                raise click.ClickException(
                    f"cannot use {str(folder)!r}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of your own"
                ) from error
            _say(f"{folder} cannot be used: {error.strerror}; this fleet's file is elsewhere")
        else:
            return folder
    raise AssertionError("the last one returns or raises")


def _make_ours(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(0, "its folder belongs to another user", str(folder))
    folder.chmod(0o700)


def _is_ours(folder: Path) -> bool:
    """Return False without a folder; in a shared parent another user may have made it first."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(0, "it is not a folder, or belongs to another user", str(folder))
    return True


def _file_name(fleet: LocalFleet) -> str:
    """Name the file by port and pid: fleets may have the same port at different addresses."""
    return f"{fleet.port}-{fleet.pid}.json"


def _is_of_another(path: Path, fleet: LocalFleet) -> bool:
    """Another container may have the same port and pid."""
    try:
        return _process_of(_decode(_content(path))) != _process_of(fleet)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _read_all(folder: Path, pattern: str) -> list[LocalFleet]:
    return [fleet for path in sorted(folder.glob(pattern)) if (fleet := _read(path)) is not None]


def _read(path: Path) -> LocalFleet | None:
    """Return a file's fleet; None without a file, and with a note for one that cannot be used."""
    try:
        return _decode(_content(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        _say(f"{path} is skipped: {error.strerror}")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _say(f"{path} is skipped: {error}; remove it")
    return None


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(0, "other users can write to it", str(path))
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def _read_text(path: Path) -> str:
    """Return a file of /proc, empty if it is not there (any more)."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ---- which one


def _where(fleet: LocalFleet, fleets: list[LocalFleet]) -> Where:
    routers = tuple(each.router_url for each in fleets if each.controller == fleet.controller)
    return Where(fleet.controller, fleet.key, fleet, routers)


def _only(fleets: list[LocalFleet]) -> LocalFleet:
    if not fleets:
        raise click.ClickException(
            "no fleet runs on this machine; start one with `warmroute up`, or name one elsewhere: "
            f"{example('fleet', 'HOST:PORT')}"
        )
    if len(fleets) > 1:
        raise click.ClickException(
            f"{len(fleets)} fleets run on this machine: {listed(fleets)}; name one: "
            f"{example('fleet', str(fleets[0].port))}"
        )
    return fleets[0]


def _at_port(fleets: list[LocalFleet], port: int) -> list[LocalFleet]:
    """Find the fleets by their router's port, else by their controller's."""
    of_routers = [fleet for fleet in fleets if fleet.port == port]
    return of_routers or [fleet for fleet in fleets if _port_of(fleet.controller) == port]


def _at_url(fleets: list[LocalFleet], url: str) -> list[LocalFleet]:
    """Find the fleet by its controller's URL, else by the port of a router here."""
    named = sorted((fleet for fleet in fleets if fleet.controller == url), key=lambda fleet: fleet.found)
    port = _port_of(url)
    if named or port is None or urlsplit(url).hostname not in LOOPBACK:
        return named[:1]
    return _at_port(fleets, port)


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _answers(url: str) -> bool:
    try:
        socket.create_connection((urlsplit(url).hostname or "", _port_of(url) or 80), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _say(text: str) -> None:
    click.echo(f"Note: {text}", err=True)
