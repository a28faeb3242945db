"""Starts or follows the fleet that `warmroute up` was asked for, and tells people and other commands of it."""

import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import uvloop

from fleet.commands.addresses.local_fleets import LocalFleet, process_started, record_fleet, remove_record
from fleet.commands.view import View
from fleet.control.reconcile import first_count
from fleet.display import Display
from fleet.on_ray.orders import Launched
from fleet.output import say
from fleet.plan import FleetPlan
from fleet.up.announcement import announcement, authority, remarks_on
from fleet.up.following import Following
from fleet.up.launching import InThisProcess, Launcher, OnRay
from fleet.up.planning import FLEET_KEY, KEY, Settings, router_config
from fleet.up.running import FleetRun, Job
from fleet.up.watching import CannotStart
from router.members.watched_file import WatchedFile
from router.process.setting_types import SECRET

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listened at, but asked at one


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
    shown = display if display.bar is not None else None
    told = Telling(plan, settings, listener, folder, key, shown, after, logs=str(folder))
    told.say(f"Starting {_replicas(plan)}")
    job = Job(
        plan=plan,
        launcher=launcher,
        key=key,
        listener=listener,
        router=router,
        say=told.say,
        show=told.show,
        launched=told.launched,
        announce=told.announce,
    )
    running, broken = FleetRun(job), True
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


@dataclass
class Telling:
    """Tells people and other commands of a fleet that has started."""

    plan: FleetPlan
    settings: Settings
    listener: socket.socket | None
    folder: Path
    key: str
    display: Display | None  # None: without a terminal, or no longer
    after: ExitStack
    logs: str
    controller: str = ""
    announced: bool = False

    def say(self, text: str) -> None:
        """Print; once all is announced, with the time, as this may be read much later."""
        if self.announced:
            text = f"{time.strftime('%H:%M:%S')} {text}"
        say(text) if self.display is None else self.display.line(text)

    def show(self, view: View) -> None:
        """Show how many replicas are ready, while they start."""
        if self.display is not None:
            ready, wanted = (sum(getattr(model, key) for model in view.models) for key in ("ready", "wanted"))
            self.display.step(ready, wanted, f"{ready} of {wanted} replicas are ready")

    def launched(self, started: Launched, took_s: float) -> None:
        if self.settings.ray:
            self.say(f"Ray is ready after {took_s:.1f} s")
        self.logs = started.logs or self.logs
        self.controller = started.controller
        if self.listener is None:
            return
        local = LocalFleet(
            port=self.listener.getsockname()[1],
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            controller=started.controller,
            key=self.key if FLEET_KEY in os.environ or not started.found else None,  # a found fleet has its own
            found=started.found,
            folders=() if self.settings.log_dir else (str(self.folder),),
            router=url_here(self.listener),
        )
        record_fleet(local)
        self.after.callback(partial(remove_record, local))

    def announce(self, view: View) -> None:
        if self.display is not None:
            self.display.close()
            self.display = None
        self.announced = True
        if self.listener is None:
            say(f"\n{_replicas(self.plan)} of the cluster are ready; routers find them with\n")
            say(f"  warmroute router --registry {self.controller}\n")
            say(f"warmroute down {self.controller} ends them.")
            return
        url = f"http://{authority(*self.listener.getsockname()[:2])}"
        say(announcement(url, view, remarks_on(self.plan), guarded=KEY in os.environ))
        kept = "" if self.settings.log_dir else ",\nkept only if something fails"
        say(f"Logs: {self.logs}{kept}.")
        say("Elsewhere: warmroute status, scale, restart, logs. Ctrl-C ends everything.")


def _replicas(plan: FleetPlan) -> str:
    counts = [(first_count(model), model.name) for model in plan.models]
    return ", ".join(f"{count} replica{'s' * (count != 1)} of {name}" for count, name in counts)


def url_here(listener: socket.socket) -> str:
    """Return a URL that clients on this machine can ask."""
    host, port = listener.getsockname()[:2]
    return f"http://{authority(EVERY_ADDRESS.get(host, host), port)}"


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
