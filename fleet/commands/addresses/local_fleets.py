"""The fleets of this machine: `warmroute up` keeps a file for each, so that other commands find its controller.

The folder is this user's alone. New fields go last.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Meta, Struct

from api.process.options import SettingOption
from fleet.commands.addresses.address import Command, FleetAddress, example, optional_argument
from router.process.setting_types import SECRET

FOLDER_PREFIX = "warmroute-"  # nothing with another name is ever removed
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Port = Annotated[int, Meta(ge=1, le=65535)]
HeaderText = Annotated[str, Meta(pattern=r"\A[!-~]+\Z")]


class LocalFleet(Struct, frozen=True, kw_only=True):
    port: Port  # its router's port
    pid: Annotated[int, Meta(ge=1)]  # the process of `warmroute up`
    started: int  # `process_started(pid)`: tells it from a later process with the same pid
    controller: Annotated[str, Meta(pattern="^https?://")]  # its URL
    key: HeaderText | None = None  # the controller's key
    folders: tuple[str, ...] = ()  # temporary ones, to be removed should it be killed
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


_decode = msgspec.json.Decoder(LocalFleet).decode


# ---- files


def record_fleet(fleet: LocalFleet) -> Path:
    """Write its file, in one piece or not at all; what a killed one on the same port has left is removed before."""
    for before in recorded_fleets():
        if before.port == fleet.port and not is_running(before):
            clean_up(before)
    path = _path(fleet)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(path.parent):
            raise PermissionError(0, "others can write to its folder")
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")  # its mode is 0600
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(fleet))
        os.replace(temporary, path)
    except OSError as error:
        raise click.ClickException(
            f"cannot write {str(path)!r}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of your own"
        ) from error
    return path


def remove_record(fleet: LocalFleet) -> None:
    """Remove its file, and the folder if it is empty."""
    path = _path(fleet)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def recorded_fleets() -> list[LocalFleet]:
    """Return every fleet that has a file, running or not; report and skip files that cannot be read."""
    folder, found = _folder(), []
    for path in sorted(folder.glob("*.json")) if _is_ours(folder) else ():
        try:
            found.append(_decode(path.read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _say(f"{path} is skipped: {error}; remove it")
    return found


def clean_up(fleet: LocalFleet) -> None:
    """Remove the remains of a killed fleet."""
    for name in fleet.folders:
        if Path(name).name.startswith(FOLDER_PREFIX):
            shutil.rmtree(name, ignore_errors=True)
    remove_record(fleet)


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # One that su and sudo have left in the environment is another user's.
    if os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        return Path(runtime) / "warmroute"
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{os.geteuid()}"


def _path(fleet: LocalFleet) -> Path:
    """Its file: fleets may have the same port at different addresses."""
    return _folder() / f"{fleet.port}-{fleet.pid}.json"


def _is_ours(folder: Path) -> bool:
    """Return True if only this user can read it; in a shared parent another one may have made it first."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


# ---- which of them run


def process_started(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie has ended


def is_running(fleet: LocalFleet) -> bool:
    return process_started(fleet.pid) == fleet.started


def running_fleets() -> list[LocalFleet]:
    """Return the fleets that run; clean up after killed ones, with a note."""
    living = []
    for fleet in recorded_fleets():
        if is_running(fleet):
            living.append(fleet)
            continue
        clean_up(fleet)
        _say(f"the fleet of port {fleet.port} was killed (pid {fleet.pid}); its remains are removed")
    return sorted(living, key=lambda fleet: (fleet.port, fleet.started))


def find(which: str | None) -> Where:
    """`which` is a URL, of a controller or of the router of a fleet here; a port; or None: the only fleet here."""
    fleets = running_fleets()
    if which is None:
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
    found = fleets
    if which is not None:  # a controller's URL, else the port here of a router, or else of a controller
        named = sorted((fleet for fleet in fleets if fleet.controller == which), key=lambda fleet: fleet.found)
        port = int(which) if which.isdecimal() else _port_of(which) if urlsplit(which).hostname in LOOPBACK else None
        of_routers = [fleet for fleet in fleets if fleet.port == port]
        of_controllers = [fleet for fleet in fleets if _port_of(fleet.controller) == port]
        found = named[:1] or ([] if port is None else of_routers or of_controllers)
    if len(found) > 1:
        raise click.ClickException(
            f"{which} matches several fleets: {listed(found)}; name one by the URL of its controller"
        )
    if which is not None and not found:
        if which.isdecimal():
            raise click.ClickException(f"no fleet on this machine has port {which}; running: {listed(fleets)}")
        return Where(which, None, None)
    [fleet] = found
    routers = tuple(each.router_url for each in fleets if each.controller == fleet.controller)
    return Where(fleet.controller, fleet.key, fleet, routers)


def listed(fleets: list[LocalFleet]) -> str:
    return ", ".join(f"port {fleet.port} (controller {fleet.controller})" for fleet in fleets) or "none"


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _say(text: str) -> None:
    click.echo(f"Note: {text}", err=True)


# ---- the options that name a fleet


def fleet_options(command: Command) -> Command:
    """`--fleet` and `--fleet-key`, the parameters `which` and `fleet_key`."""
    key = click.option(
        "--fleet-key",
        cls=SettingOption,
        type=SECRET,
        metavar="KEY",
        envvar="WARMROUTE_FLEET_KEY",
        help="The fleet's key. Better given as WARMROUTE_FLEET_KEY.  [default: stored for this user's fleets on "
        "this machine]",
    )
    fleet = click.option(
        "--fleet",
        "which",
        cls=SettingOption,
        type=FleetAddress(),
        metavar="ADDRESS",
        envvar="WARMROUTE_FLEET",
        help="The fleet: its router's PORT on this machine, or its controller's URL or HOST:PORT.  "
        "[default: the only fleet on this machine]",
    )
    return fleet(key(command))


def fleet_argument(command: Command) -> Command:
    """The fleet as the first argument or as --fleet, and its key."""
    return optional_argument("fleet", "which", FleetAddress())(fleet_options(command))


def locate(which: str | None, fleet_key: str | None) -> Where:
    where = find(which)
    return where if fleet_key is None else where._replace(key=fleet_key)
