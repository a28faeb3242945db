"""`warmroute up`: several replicas on this machine, and a router that speaks the OpenAI API."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import click
import uvloop
from click.core import ParameterSource

from api.options import SettingOption
from api.settings import TEXT, Unusable
from fleet.announcement import announcement, authority, remark_on
from fleet.child import Log, Ready
from fleet.local import CannotStart, LocalFleet, Plan
from fleet.ports import EventPorts
from fleet.voice import say
from replica.cli import replica
from replica.config import EngineConfig, ReplicaConfig
from replica.configure import config_from
from replica.settings import MODEL
from router.config import Policy, RouterConfig
from router.keys import keys_from_options

OWN_OF_EACH = ("port", "events_port", "replica_name")
Command = TypeVar("Command", bound=Callable[..., Any])


class Wishes(NamedTuple):
    """What the command line asks for."""

    replicas: int
    host: str
    port: int
    engine: str
    model: str
    events_port: int
    log_dir: str | None
    policy: Policy
    more: tuple[str, ...]  # options for every replica


def option(key: str, metavar: str, **rest: Any) -> Callable[[Command], Command]:
    """An option with the same environment variable as that of a replica has."""
    name = "--" + key.replace("_", "-")
    rest = {"show_default": True, "envvar": f"WARMROUTE_{key.upper()}", **rest}
    return click.option(name, key, cls=SettingOption, metavar=metavar, **rest)


@click.command()
@option("replicas", "N", type=click.IntRange(1, 64), default=2, help="How many replicas.")
@option("host", "HOST", type=TEXT, default="127.0.0.1", help="The address that the router listens on.")
@option(
    "port",
    "PORT",
    type=click.IntRange(0, 65535),
    default=8000,
    help="The port that the router listens on; 0: any free one.",
)
@option(
    "engine",
    "native|simulated",
    type=click.Choice(["native", "simulated"]),
    default="native",
    help="The replicas' engine: compute, or pretend to.",
)
@option("model", "NAME|DIR", type=MODEL, default="demo", help="The replicas' model.")
@option(
    "events_port",
    "PORT",
    type=click.IntRange(0, 65532),
    default=5557,
    help="Where the replicas' event sockets begin, four ports each; taken ones are passed over. 0: any free ones.",
)
@option(
    "policy",
    "NAME",
    type=click.Choice(get_args(Policy)),
    default="cost",
    help=f"How a replica is chosen: {', '.join(get_args(Policy))}.",
)
@option("api_key", "KEY", type=TEXT, help="Demand this key of clients. Better given as WARMROUTE_API_KEY.")
@option("log_dir", "DIR", type=click.Path(file_okay=False), help="Keep the replicas' logs here.")
@click.argument("replica_options", nargs=-1, type=click.UNPROCESSED)
def up(api_key: str | None, replica_options: tuple[str, ...], **options: object) -> int:
    """Start several replicas here, and a router that speaks the OpenAI API.

    The router sends each request where its prefix is cached and the queue is short (see `warmroute router --help`). A
    replica that dies is started again. What stands behind -- goes to every replica (see `warmroute replica --help`).

    Every option is also an environment variable: --log-dir is WARMROUTE_LOG_DIR there. The settings of replicas in the
    environment count too, but WARMROUTE_HOST, WARMROUTE_PORT and WARMROUTE_EVENTS_PORT are those of up itself, and
    WARMROUTE_REPLICA_NAME counts for nothing.

    \b
    Examples:
      warmroute up
      warmroute up --replicas 4 --port 9000
      warmroute up --model path/to/model -- --dtype bfloat16 --kv-cache-gb 8
      warmroute up --engine simulated -- --num-blocks 512 --simulated-prefill-tokens-per-s 20000

    Ctrl-C and SIGTERM let running requests finish, for as long as the replicas' --drain-timeout says (60 seconds if
    it is not given), and end everything; a second one does not wait. Exit status: 0 ended as asked, 1 could not start,
    2 a setting cannot be used.
    """
    wishes = Wishes(**options, more=replica_options)  # type: ignore[arg-type]
    if api_key:
        os.environ["WARMROUTE_API_KEY"] = api_key  # a replica's command line is for everybody to read
    config = replica_config(wishes)
    listener = bind(wishes.host, wishes.port)
    logs = log_folder(wishes.log_dir)
    fleet_failed = True
    try:
        fleet_failed = uvloop.run(serve(wishes, config, listener, logs))
    except CannotStart as error:
        raise click.ClickException(f"{error}\nThe whole log is in {logs}") from error
    finally:
        listener.close()
        if not fleet_failed and wishes.log_dir is None:
            shutil.rmtree(logs, ignore_errors=True)  # somebody may have tidied up before us
    if fleet_failed:
        say(f"Something failed on the way; the logs are in {logs}")
    return 0


async def serve(wishes: Wishes, config: ReplicaConfig, listener: socket.socket, logs: Path) -> bool:
    """Run the fleet until a signal; returns whether anything failed on the way."""
    url = f"http://{authority(*listener.getsockname()[:2])}"
    say(f"Starting {wishes.replicas} replicas of {config.engine.model}")

    def announce(ready: Mapping[str, Ready]) -> None:
        say(announcement(url, ready, remark=remark_on(config.engine), guarded=config.api_key is not None))
        kept = "" if wishes.log_dir else ",\nkept only if something fails"
        say(f"Logs: {logs}{kept}. Ctrl-C ends everything.")

    ports = EventPorts(wishes.events_port)
    with ExitStack() as open_logs:
        fleet = LocalFleet(
            plans(wishes, config.engine, logs, open_logs), ports.take, listener, say, router_config(wishes, config)
        )
        await fleet.run(announce)
    return fleet.failed


def router_config(wishes: Wishes, replica: ReplicaConfig) -> RouterConfig:
    """The router makes prompts as the replicas do, and has their key."""
    key = replica.api_key
    return RouterConfig(
        host=wishes.host,
        policy=wishes.policy,
        keys=() if key is None else tuple(keys_from_options([key], None)),
        demand_key=key is not None,
        replica_api_key=key,
        max_body_bytes=replica.max_body_bytes,
        model_dirs={} if replica.tokenizer is None else {replica.engine.model: replica.tokenizer},
        chat_templates={} if replica.chat_template is None else {replica.engine.model: replica.chat_template},
        drain_timeout_s=replica.drain_timeout_s,
        slow_start_s=0.0,
    )


def replica_config(wishes: Wishes) -> ReplicaConfig:
    """What every replica will be told: read here first, so that a mistake costs no start."""
    arguments = ["--model", wishes.model, "--engine", wishes.engine, *wishes.more]
    with replica.make_context("warmroute replica", arguments, max_content_width=100) as ctx:
        for key in OWN_OF_EACH:
            if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE:
                name = "--" + key.replace("_", "-")
                raise Unusable(f"{name} behind -- would be the same for every replica; leave it out")
        return config_from(ctx)


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
            return Path(tempfile.mkdtemp(prefix="warmroute-up-"))
        Path(wanted).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        named = f"--log-dir: cannot make {wanted!r}" if wanted else "cannot make a folder for the logs"
        raise click.ClickException(f"{named}: {error.strerror}; choose another --log-dir") from error
    return Path(wanted)


def plans(wishes: Wishes, engine: EngineConfig, logs: Path, open_logs: ExitStack) -> list[Plan]:
    made = []
    for number in range(wishes.replicas):
        name = f"replica-{number}"
        try:
            log = Log(logs / f"{name}.log")
        except OSError as error:
            raise click.ClickException(f"cannot write {error.filename}: {error.strerror}; see --log-dir") from error
        open_logs.callback(log.close)
        made.append(Plan(name, command_of(wishes, engine, name), log))
    return made


def command_of(wishes: Wishes, engine: EngineConfig, name: str) -> Callable[[int], list[str]]:
    """How the replica's command is made when the ports of its events are known.

    Where the model lies is found out once, before: no replica needs the network for it, neither now nor when it is
    started again.
    """
    shared = ["--die-with-parent", "--model", wishes.model, "--engine", wishes.engine]
    own = ["--host", "127.0.0.1", "--port", "0", "--replica-name", name]
    found = ["--model", engine.model_path, "--served-model-name", engine.model] if engine.model_path else []
    return lambda port: replica_command([*shared, *own, "--events-port", str(port), *wishes.more, *found])


def replica_command(options: Sequence[str]) -> list[str]:
    """The child sees the current folder as a place of modules only if this process does."""
    safe = [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]
    return [sys.executable, *safe, "-m", "fleet", "replica", *options]
