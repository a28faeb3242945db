"""`warmroute up`: replicas of one model or of many, kept running, and a router that speaks the OpenAI API."""

import importlib.util
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import click
import uvloop

from api.options import SettingOption
from api.settings import TEXT
from fleet.commands.local_fleets import LocalFleet, process_started, record_fleet, remove_record
from fleet.commands.view import View
from fleet.control.reconcile import first_count
from fleet.display import Display
from fleet.on_ray.orders import Launched
from fleet.output import say
from fleet.plan import FleetPlan, bounded
from fleet.toml.plan_file import read_fleet
from fleet.up.announcement import announcement, authority, remarks_on
from fleet.up.following import Following
from fleet.up.launching import InThisProcess, Launcher, OnRay
from fleet.up.planning import KEY, check_alone, complete, one_model, router_config, with_kv_secrets
from fleet.up.running import FleetRun, Job
from fleet.up.watching import CannotStart
from replica.settings import MODEL
from router.config import Policy
from router.settings import SECRET
from router.watched_file import WatchedFile

FLEET_KEY = "WARMROUTE_FLEET_KEY"
IN_THE_FILE = ("model", "replicas", "simulated", "policy", "replica_options")
NO_RAY = (
    "Ray is not installed. Install it with: pip install 'warmroute[ray]'\n"
    "Or go without it, with plain processes on this machine: warmroute up --no-ray"
)
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listened at, but asked at one
Command = TypeVar("Command", bound=Callable[..., Any])


class Settings(NamedTuple):
    """The command line's settings beside the plan."""

    host: str
    port: int
    ray: bool
    address: str | None
    namespace: str
    controller_port: int
    router: bool
    follow: bool
    log_dir: str | None


def option(key: str, metavar: str, **rest: Any) -> Callable[[Command], Command]:
    """Make an option with the environment variable WARMROUTE_<KEY>, as `warmroute replica` has it."""
    name = "--" + key.replace("_", "-")
    rest = {"show_default": True, "envvar": f"WARMROUTE_{key.upper()}", **rest}
    return click.option(name, key, cls=SettingOption, metavar=metavar, **rest)


@click.command()
@option(
    "config",
    "FILE",
    type=click.Path(exists=True, dir_okay=False),
    envvar="WARMROUTE_FLEET_FILE",  # WARMROUTE_CONFIG is a replica's
    help="A fleet.toml: models and their replicas.",
)
@option("model", "NAME|DIR", type=MODEL, default="demo", help="The replicas' model, without a --config.")
@option("replicas", "N", type=click.IntRange(1, 64), default=2, help="Number of replicas.")
@click.option(
    "--simulated",
    is_flag=True,
    envvar="WARMROUTE_SIMULATED",
    help="Simulate the model: made-up text at a realistic pace; no weights.",
)
@option(
    "policy",
    "NAME",
    type=click.Choice(get_args(Policy)),
    default="cost",
    help=f"How a replica is chosen: {', '.join(get_args(Policy))}.",
)
@option("host", "HOST", type=TEXT, default="127.0.0.1", help="The router's address.")
@option(
    "port",
    "PORT",
    type=click.IntRange(0, 65535),
    default=8000,
    help="The router's port; 0: any free one.",
)
@option("api_key", "KEY", type=TEXT, help="Require this key from clients. Better given as WARMROUTE_API_KEY.")
@click.option(
    "--ray/--no-ray",
    default=True,
    envvar="WARMROUTE_RAY",
    help="Run replicas on Ray, or as plain processes.",
    show_default=True,
)
@option("address", "ADDRESS", type=TEXT, help="Join the Ray cluster at HOST:PORT (auto: this machine's).")
@option("namespace", "NAME", type=TEXT, default="warmroute", help="Ray namespace of the fleet's actors.")
@option(
    "controller_port",
    "PORT",
    type=click.IntRange(0, 65535),
    default=8790,
    help="The controller's port in a cluster, on the head node; 0: any free one.",
)
@click.option(
    "--router/--no-router",
    default=True,
    envvar="WARMROUTE_ROUTER",
    help="Run a router here; without one, leave a cluster's fleet running once it is ready.",
    show_default=True,
)
@click.option(
    "--follow",
    is_flag=True,
    envvar="WARMROUTE_FOLLOW",
    help="Stay, without a router, and keep a cluster's fleet as --config says: send its plan again when the file "
    "changes, and when the controller is gone.",
)
@option("log_dir", "DIR", type=click.Path(file_okay=False), help="Keep the replicas' logs here.")
@click.argument("replica_options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def up(ctx: click.Context, /, config: str | None, api_key: str | None, **options: Any) -> int:
    """Start replicas, on this machine or over a Ray cluster, and a router that speaks the OpenAI API.

    The router sends each request where its prefix is cached and the queue is short (see `warmroute router --help`). A
    replica that dies or hangs is restarted. Options after -- go to every replica (see `warmroute
    replica --help`); several models, GPUs and automatic scaling need a --config.

    Every option is also an environment variable: --log-dir is WARMROUTE_LOG_DIR there, and --config is
    WARMROUTE_FLEET_FILE. The settings of replicas and of the router in the environment count too, but for what the
    fleet itself says.

    \b
    Examples:
      warmroute up
      warmroute up --replicas 4 --port 9000
      warmroute up --no-ray --simulated -- --num-blocks 512 --simulated-prefill-tokens-per-s 20000
      warmroute up --model path/to/model -- --dtype bfloat16 --kv-cache-gb 8
      warmroute up --config fleet.toml --address 10.0.0.1:6379

    While it runs there are `warmroute status`, `scale`, `restart`, `drain`, `logs`, and `down`, which ends it as Ctrl-C
    and SIGTERM do. They let running requests finish, for as long as the replicas' --drain-timeout says (60 seconds if
    it is not given), and end everything; a second one does not wait. Exit status: 0 ended as asked, 1 could not start,
    2 a setting cannot be used.
    """
    if api_key:
        os.environ[KEY] = api_key  # a replica's command line is for everybody to read
    check_alone(ctx, config, IN_THE_FILE)
    plan = plan_of(config, options)
    settings = Settings(**{name: options[name] for name in Settings._fields})
    check_together(settings)
    if settings.follow:
        if config is None:
            raise click.UsageError("--follow needs a --config, the file to follow")
        return follow(plan, settings, config, lambda: plan_of(config, options))
    if settings.address is None:  # a cluster's fleet outlives this process, and would restart for another secret
        plan = with_kv_secrets(plan)
    with ExitStack() as after:
        return start(plan, settings, after)


def fleet_key() -> str:
    """Return the controller's key, a random one by default; other commands find it in the fleet's file."""
    given = os.environ.get(FLEET_KEY)
    if given is None:
        return secrets.token_urlsafe(24)
    try:
        return SECRET.convert(given, None, None)
    except click.BadParameter as error:
        raise click.UsageError(f"{FLEET_KEY} in the environment is invalid: {error.message}") from error


def plan_of(config: str | None, options: dict[str, Any]) -> FleetPlan:
    engine = "simulated" if options["simulated"] else "native"
    try:
        if config is not None:
            return bounded(complete(read_fleet(config)))
        wanted = (options["model"], engine, options["replicas"], options["policy"], options["replica_options"])
        return bounded(one_model(*wanted))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def check_together(settings: Settings) -> None:
    if settings.address is not None and not settings.ray:
        raise click.UsageError(f"--no-ray and --address {settings.address} contradict each other; leave one out")
    if settings.follow and settings.router:
        raise click.UsageError("--follow has no router: give --no-router too, and start routers with --registry")
    if not settings.router and settings.address is None:
        raise click.UsageError("--no-router is for a cluster's fleet; give its --address too")
    if not settings.router and FLEET_KEY not in os.environ:
        raise click.UsageError(f"--no-router needs {FLEET_KEY} in the environment, the key to change and end the fleet")
    if settings.ray and importlib.util.find_spec("ray") is None:
        raise click.ClickException(NO_RAY)


def start(plan: FleetPlan, settings: Settings, after: ExitStack) -> int:
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

    def say(self, text: str) -> None:
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
            started=process_started(os.getpid()) or 0.0,
            controller=started.controller,
            key=self.key if FLEET_KEY in os.environ or not started.found else None,  # that fleet has its own
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
        Path(wanted).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        named = f"--log-dir: cannot make {wanted!r}" if wanted else "cannot make a folder for the logs"
        raise click.ClickException(f"{named}: {error.strerror}; choose another --log-dir") from error
    return Path(wanted).absolute()
