"""`warmroute up`: replicas of one model or of many, kept running, and a router that speaks the OpenAI API."""

import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar, get_args

import click

from api.process.options import SettingOption
from api.process.settings import FILE, TEXT
from fleet.plan import FleetPlan, bounded
from fleet.toml.plan_file import read_fleet
from fleet.up.planning import FLEET_KEY, KEY, Settings, check_alone, complete, one_model, with_kv_secrets
from replica.model.locate import DEMO, SMOLLM2
from replica.settings.configure import check_installed
from replica.settings.options import MODEL
from router.config import Policy

IN_THE_FILE = ("model", "replicas", "simulated", "policy", "replica_options")
NO_RAY = "Ray is not installed. Install it with: pip install 'warmroute[ray]'"
WITHOUT_RAY = "Ray is not installed: replicas are plain processes on this machine."
Command = TypeVar("Command", bound=Callable[..., Any])


def option(key: str, metavar: str, **rest: Any) -> Callable[[Command], Command]:
    """Make an option with the environment variable WARMROUTE_<KEY>, as `warmroute replica` has it."""
    name = "--" + key.replace("_", "-")
    rest = {"show_default": True, "envvar": f"WARMROUTE_{key.upper()}", **rest}
    return click.option(name, key, cls=SettingOption, metavar=metavar, **rest)


@click.command()
@option(
    "config",
    "FILE",
    type=FILE,
    envvar="WARMROUTE_FLEET_FILE",  # WARMROUTE_CONFIG is a replica's
    help="A fleet.toml: models and their replicas.",
)
@option(
    "model",
    "NAME|PATH",
    type=MODEL,
    help="The replicas' model, without a --config.  [default: smollm2, fetched on first use; demo with --simulated, or "
    "if it cannot be had]",
)
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
@option("port", "PORT", type=click.IntRange(0, 65535), default=8000, help="The router's port; 0: any free one.")
@option("api_key", "KEY", type=TEXT, help="Require this key from clients. Better given as WARMROUTE_API_KEY.")
@click.option(
    "--ray/--no-ray",
    default=None,
    envvar="WARMROUTE_RAY",
    help="Run replicas on Ray, or as plain processes.",
    show_default="on Ray if it is installed",
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
    envvar="WARMROUTE_WITH_ROUTER",  # WARMROUTE_ROUTER is the address that other commands ask
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

    Every option is also an environment variable: --log-dir is WARMROUTE_LOG_DIR there, --config is
    WARMROUTE_FLEET_FILE, and --router is WARMROUTE_WITH_ROUTER. The settings of replicas and of the router in the
    environment count too, but for what the fleet itself says.

    \b
    Examples:
      warmroute up
      warmroute up --replicas 4 --port 9000
      warmroute up --no-ray --simulated -- --num-blocks 512 --set simulated_prefill_tokens_per_s=20000
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
    options["ray"] = runs_on_ray(options["ray"], options["address"])
    settings = Settings(**{name: options[name] for name in Settings._fields})
    check_together(settings)
    if settings.follow and config is None:
        raise click.UsageError("--follow needs a --config, the file to follow")
    plan = plan_of(config, options)  # it may have to fetch a model
    if settings.follow:
        assert config is not None
        from fleet.up.starting import follow  # servers and clients: not needed to refuse a setting

        return follow(plan, settings, config, lambda: plan_of(config, options))
    if settings.address is None:  # a cluster's fleet outlives this process, and would restart for another secret
        plan = with_kv_secrets(plan)
    from fleet.up.starting import start

    with ExitStack() as after:
        return start(plan, settings, after)


def plan_of(config: str | None, options: dict[str, Any]) -> FleetPlan:
    engine = "simulated" if options["simulated"] else "native"
    try:
        if config is not None:
            return bounded(complete(read_fleet(config)))
        model = options["model"] or default_model(engine)
        wanted = (model, engine, options["replicas"], options["policy"], options["replica_options"])
        return bounded(one_model(*wanted))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def default_model(engine: str) -> str:
    if engine == "simulated":
        return DEMO
    check_installed()  # before anything is fetched
    from replica.fetching.fetch import smollm2_folder

    try:
        smollm2_folder()
    except (OSError, ValueError) as error:
        click.echo(f"Note: {error}. Serving {DEMO} in its place, a model that babbles.", err=True)
        return DEMO
    return SMOLLM2


def runs_on_ray(asked: bool | None, address: str | None) -> bool:
    """Return what was asked for; else a cluster's replicas do, and those on this machine if Ray is installed."""
    if asked is None and address is None and importlib.util.find_spec("ray") is None:
        click.echo(WITHOUT_RAY, err=True)
        return False
    return asked is not False


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
