"""Starts or follows the fleet that `warmroute up` was asked for."""

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import uvloop

from fleet.display import Display
from fleet.output import say
from fleet.plan import FleetPlan
from fleet.up.following import Following
from fleet.up.launching import InThisProcess, Launcher, OnRay
from fleet.up.planning import FLEET_KEY, Settings, router_config
from fleet.up.running import FleetRun
from fleet.up.telling import Telling, authority, replicas_of
from fleet.up.watching import CannotStart
from router.members.watched_file import WatchedFile
from router.process.setting_types import SECRET


def start(plan: FleetPlan, settings: Settings, after: ExitStack) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")  # the router's messages
    key = fleet_key()
    router = router_config(plan, settings.host, settings.port)
    listener = after.enter_context(bind(settings.host, settings.port)) if settings.router else None
    folder = log_folder(settings.log_dir)
    launcher: Launcher = (
        OnRay(folder, settings.address, settings.namespace, settings.controller_port, key)
        if settings.ray
        else InThisProcess(folder, key)
    )
    display = after.enter_context(Display("Starting", quiet=True))
    told = Telling(plan, settings, listener, folder, key, display if display.bar is not None else None, after)
    told.say(f"Starting {replicas_of(plan)}")
    running, broken = FleetRun(plan, launcher, router, told), True
    try:
        uvloop.run(running.run())
        broken = running.failed
    except CannotStart as error:
        raise click.ClickException(f"{error}\nThe whole log is in {told.logs}") from error
    finally:
        if not broken and settings.log_dir is None:
            shutil.rmtree(folder, ignore_errors=True)  # it may have been removed already
    if broken:
        say(f"Something failed; the logs are in {told.logs}")
    return 0


def follow(plan: FleetPlan, settings: Settings, config: str, read: Callable[[], FleetPlan]) -> int:
    key, folder = fleet_key(), log_folder(settings.log_dir)
    launcher = OnRay(folder, settings.address, settings.namespace, settings.controller_port, key)
    uvloop.run(Following(plan, WatchedFile(config), read, launcher, key, say).run())
    if settings.log_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Listen before anything is started, so that a port in use costs nothing."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # create_server adds to strerror; the numbers of names that cannot be resolved are negative.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise click.ClickException(
            f"cannot listen on {authority(host, port)}: {reason}; choose another --port or --host"
        ) from error


def log_folder(wanted: str | None) -> Path:
    try:
        if wanted is None:
            return Path(tempfile.mkdtemp(prefix="warmroute-"))
        Path(wanted).mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        named = f"--log-dir: cannot make {wanted!r}" if wanted else "cannot make a folder for the logs"
        raise click.ClickException(f"{named}: {error.strerror}; choose another --log-dir") from error
    return Path(wanted).absolute()


def fleet_key() -> str:
    """Return the controller's key, a random one by default; other commands find it in the fleet's file."""
    given = os.environ.get(FLEET_KEY)
    if given is None:
        return secrets.token_urlsafe(24)
    try:
        return SECRET.convert(given, None, None)
    except click.BadParameter as error:
        raise click.UsageError(f"{FLEET_KEY} in the environment is invalid: {error.message}") from error
