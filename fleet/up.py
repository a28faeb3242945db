"""`warmroute up`: several replicas on this machine, and a front that speaks the OpenAI API."""

import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import uvloop
from rich.console import Console

from fleet.child import Addresses
from fleet.local import CannotStart, LocalFleet, Plan

EVENT_PORTS = 4  # events, replay, status, snapshot
QUESTION = "Why does a warm cache answer sooner than a cold one?"
SIMULATED = (
    "The engine is simulated: its text is made up and its time is a clock's,",
    "but batching, caching and the events about it are real.",
)


class Wishes(NamedTuple):
    """What the command line asks for."""

    replicas: int
    host: str
    port: int
    engine: str
    model: str
    events_port: int
    log_dir: str | None
    more: tuple[str, ...]  # options for every replica


@click.command()
@click.option("--replicas", type=click.IntRange(1, 64), default=2, show_default=True, help="How many replicas.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address that the front listens on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port that the front listens on; 0: any free one.",
)
@click.option(
    "--engine",
    type=click.Choice(["native", "simulated"]),
    default="simulated",
    show_default=True,
    help="The replicas' engine.",
)
@click.option("--model", metavar="NAME|DIR", default="demo", show_default=True, help="The replicas' model.")
@click.option(
    "--events-port",
    type=click.IntRange(0, 65000),
    default=5557,
    show_default=True,
    help="Where the replicas' event sockets begin, four ports each; taken ones are passed over. 0: any free ones.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="WARMROUTE_API_KEY",
    help="Demand this key of clients. Better given as WARMROUTE_API_KEY.",
)
@click.option("--log-dir", type=click.Path(file_okay=False), metavar="DIR", help="Keep the replicas' logs here.")
@click.argument("replica_options", nargs=-1, type=click.UNPROCESSED)
def up(api_key: str | None, replica_options: tuple[str, ...], **options: object) -> int:
    """Start several replicas here, and a front that speaks the OpenAI API.

    The front sends each request to the next replica. A replica that dies is started again. What stands behind -- goes
    to every replica (see `warmroute replica --help`), as do the settings in the environment.

    \b
    Examples:
      warmroute up
      warmroute up --replicas 4 --port 9000
      warmroute up -- --num-blocks 512 --simulated-prefill-tokens-per-s 20000

    Ctrl-C and SIGTERM let running requests finish and end everything; a second one does not wait. Exit status: 0 ended
    as asked, 1 could not start.
    """
    wishes = Wishes(**options, more=replica_options)  # type: ignore[arg-type]
    if api_key:
        os.environ["WARMROUTE_API_KEY"] = api_key  # a replica's command line is for everybody to read
    listener = bind(wishes.host, wishes.port)
    logs = log_folder(wishes.log_dir)
    fleet_failed = True
    try:
        fleet_failed = uvloop.run(serve(wishes, listener, logs, bool(api_key)))
    except CannotStart as error:
        raise click.ClickException(f"{error}\nThe whole log is in {logs}") from error
    finally:
        listener.close()
        if not fleet_failed and wishes.log_dir is None:
            shutil.rmtree(logs)
    if fleet_failed:
        click.echo(f"Something failed on the way; the logs are in {logs}")
    return 0


async def serve(wishes: Wishes, listener: socket.socket, logs: Path, guarded: bool) -> bool:
    """Run the fleet until a signal; returns whether anything failed on the way."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    url = f"http://{authority(*listener.getsockname()[:2])}"
    with console.status(f"Starting {wishes.replicas} replicas of {wishes.model}") as status:

        def announce(ready: Mapping[str, Addresses]) -> None:
            status.stop()
            console.print(announcement(wishes, url, ready, guarded))
            kept = "" if wishes.log_dir else ", kept only if something fails"
            console.print(f"Logs: {logs}{kept}. Ctrl-C ends everything.")

        fleet = LocalFleet(plans(wishes, logs), listener, console.print)
        await fleet.run(announce)
    return fleet.failed


def bind(host: str, port: int) -> socket.socket:
    """Listen before anything is started, so that a port in use costs nothing."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # create_server adds to strerror; the numbers of names that cannot be resolved are negative.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise click.ClickException(
            f"cannot listen on {authority(host, port)}: {reason.lower()}; choose another --port or --host"
        ) from error


def log_folder(wanted: str | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="warmroute-up-"))
    try:
        Path(wanted).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"--log-dir: cannot make {wanted!r}: {error.strerror}") from error
    return Path(wanted)


def plans(wishes: Wishes, logs: Path) -> list[Plan]:
    made, next_port = [], wishes.events_port
    for number in range(wishes.replicas):
        events_port = next_port = free_ports(next_port) if next_port else 0
        next_port += EVENT_PORTS if next_port else 0
        name = f"replica-{number}"
        options = [
            "--die-with-parent",
            "--model",
            wishes.model,
            "--engine",
            wishes.engine,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        options += ["--replica-name", name, "--events-port", str(events_port), *wishes.more]
        made.append(Plan(name, replica_command(options), logs / f"{name}.log"))
    return made


def replica_command(options: Sequence[str]) -> list[str]:
    """The child sees the current folder as a place of modules only if this process does."""
    safe = [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]
    return [sys.executable, *safe, "-m", "fleet", "replica", *options]


def free_ports(first: int) -> int:
    """The first of the next four free ports in a row, from here on."""
    for start in range(first, 65536 - EVENT_PORTS, EVENT_PORTS):
        if all(is_free(port) for port in range(start, start + EVENT_PORTS)):
            return start
    raise click.ClickException(f"no four free ports in a row from {first} on; choose another --events-port")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def announcement(wishes: Wishes, url: str, ready: Mapping[str, Addresses], guarded: bool) -> str:
    """What runs where, and how to ask it."""
    count = len(ready)
    who = f"{count} replicas of {wishes.model} answer in turn" if count > 1 else f"A replica of {wishes.model} answers"
    lines = ["", f"{who} at {url}", ""]
    for name, at in sorted(ready.items(), key=lambda item: (len(item[0]), item)):
        lines.append(f"  {name}  http://{authority(at.host, at.port)}  events {at.events or 'off'}")
    lines += ["", *SIMULATED] if wishes.engine == "simulated" else []
    lines += ["", f"Ask {count + 1} times: the last answer comes from a cache that is warm (cached_tokens).", ""]
    lines += [f"  {line}" for line in curl(wishes.model, url, guarded)]
    lines += ["", "Or from Python:", ""]
    lines += [f"  {line}" for line in python(wishes.model, url, guarded)]
    return "\n".join([*lines, ""])


def curl(model: str, url: str, guarded: bool) -> list[str]:
    body = json.dumps({"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": QUESTION}]})
    key = '-H "Authorization: Bearer $WARMROUTE_API_KEY" ' if guarded else ""
    return [f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\", f"  -d {shlex.quote(body)}"]


def python(model: str, url: str, guarded: bool) -> list[str]:
    key = 'os.environ["WARMROUTE_API_KEY"]' if guarded else '"none"'
    return [
        "import os, openai" if guarded else "import openai",
        f'client = openai.OpenAI(base_url="{url}/v1", api_key={key})',
        f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
        f"answer = client.chat.completions.create(model={json.dumps(model)}, messages=messages, max_tokens=16)",
        "print(answer.choices[0].message.content, answer.usage)",
    ]
