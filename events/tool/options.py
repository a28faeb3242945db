"""The options that several tools share, and what a FILE or ENDPOINT argument means."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx2
import msgspec
from msgspec import Struct

from events.publisher import EventEndpoints
from events.recording import BadRecording, Moment, Recording
from events.sockets.curve import CurveClient, load_curve_client
from events.source import ENDPOINT, Source, can_connect
from events.tool.words import Decode

Command = Callable[..., Any]

HTTP_TIMEOUT_S = 5.0
API_KEY = "WARMROUTE_API_KEY"
_HOST_PORT = re.compile(r"[\w.\-\[\]:]+:\d+")


class StreamOptions(Struct, frozen=True):
    """The other sockets of the endpoints; `replay`, `status` and `snapshot` in the endpoints' order."""

    replay: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    snapshot: tuple[str, ...] = ()
    topic: str = ""
    model: str = ""
    curve_server: str | None = None
    curve_secret: str | None = None


class Target(NamedTuple):
    """The meaning of a FILE or ENDPOINT argument: an opened recording, or sources to follow live."""

    name: str
    sources: list[Source]
    recording: Recording | None = None


def stream_options(command: Command) -> Command:
    """Add the options for streams; the command gets them as one argument, `stream`."""

    @wraps(command)
    def collected(*arguments: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in StreamOptions.__struct_fields__}
        return command(*arguments, stream=StreamOptions(**own), **options)

    for option in reversed(_STREAM_OPTIONS):
        collected = option(collected)
    return collected


class MomentType(click.ParamType[Moment]):
    name = "MOMENT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        text = str(value)
        try:
            if text.isdecimal():
                return Moment(seq=int(text))
            if text.startswith("+"):
                return Moment(after_s=float(text))
            return Moment(time_s=datetime.fromisoformat(text).timestamp())
        except ValueError:
            how = "write 1234 (a batch), +12.5 (seconds) or 2026-11-21T09:30:00"
            self.fail(f"{text!r} is not a moment; {how}", param, ctx)


def load_tokenizer(_: click.Context, __: click.Parameter, folder: str | None) -> Decode | None:
    """The decoder of a model folder's `tokenizer.json` (or of that file); special tokens are shown."""
    if folder is None:
        return None
    from tokenizers import Tokenizer  # slow to import, and only text needs it

    file = Path(folder)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise click.UsageError(f"--tokenizer: {file} does not exist; name a folder with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise click.UsageError(f"--tokenizer: {file} is not a tokenizer: {error}") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


tokenizer_option = click.option(
    "--tokenizer",
    "decode",
    metavar="DIR",
    callback=load_tokenizer,
    help="Show text instead of token ids, by this folder's tokenizer.json.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
for_option = click.option(
    "--for", "for_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="End after this time."
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="How long to wait for a live stream to be complete.",
)

_STREAM_OPTIONS = [
    click.option("--replay", multiple=True, metavar="ENDPOINT", help="The engine's replay socket."),
    click.option(
        "--status",
        multiple=True,
        metavar="ENDPOINT",
        help="The status socket of a warmroute replica (with --snapshot).",
    ),
    click.option("--snapshot", multiple=True, metavar="ENDPOINT", help="The snapshot socket of a warmroute replica."),
    click.option("--topic", default="", help="Only messages whose topic starts with this."),
    click.option("--model", default="", help="The model's name, which is part of every block key."),
    click.option("--curve-server", metavar="FILE", help="The engine's public CURVE key."),
    click.option("--curve-secret", metavar="FILE", help="Your own secret CURVE key (see keygen)."),
]


def open_target(argument: str, stream: StreamOptions) -> Target:
    return open_targets([argument], stream)[0]


def open_targets(arguments: Sequence[str], stream: StreamOptions) -> list[Target]:
    """Open every FILE and make a source of every ENDPOINT; raise a click error that names the wrong one."""
    endpoints = [argument for argument in arguments if "://" in argument]
    sockets = [endpoint for endpoint in endpoints if not endpoint.startswith(("http://", "https://"))]
    if twice := [endpoint for endpoint, times in Counter(endpoints).items() if times > 1]:
        raise click.UsageError(f"{twice[0]} appears twice")
    if not endpoints:
        for option in ("replay", "status", "snapshot", "topic", "curve_server", "curve_secret"):
            if getattr(stream, option):
                shown = option.replace("_", "-")
                raise click.UsageError(f"--{shown} needs an ENDPOINT; a recording has its own sockets")
    sources = {endpoint: _source(endpoint, index, len(sockets), stream) for index, endpoint in enumerate(sockets)}
    targets = []
    for argument in arguments:
        if argument not in endpoints:
            if not Path(argument).is_file():
                hint = f"; an endpoint is written tcp://{argument}" if _HOST_PORT.fullmatch(argument) else ""
                raise click.UsageError(f"no file {argument!r}{hint}")
            try:
                recording = Recording(argument)
            except (OSError, BadRecording) as error:
                raise click.UsageError(str(error)) from error
            own = [msgspec.structs.replace(s, model=stream.model or s.model) for s in recording.sources]
            targets.append(Target(argument, own, recording))
            continue
        if (source := sources.get(argument)) is None:  # the HTTP address of a replica, which says where its sockets are
            source = source_at(argument)
            source = msgspec.structs.replace(
                source, topic=stream.topic or source.topic, model=stream.model or source.model, curve=_curve(stream)
            )
        targets.append(Target(argument, [source]))
    return targets


def checked_endpoint(value: str, option: str, *, bind: bool = False) -> str:
    """The endpoint, if it can be connected to (or bound: to all addresses, and to a free port)."""
    if not can_connect(re.sub(r":[0*]$", ":1", value).replace("*", "0") if bind else value):
        raise click.UsageError(f"{option}: {value!r} is not an endpoint; write {ENDPOINT}")
    return value


def _source(endpoint: str, index: int, count: int, stream: StreamOptions) -> Source:
    def own(option: str) -> str | None:
        values: tuple[str, ...] = getattr(stream, option)
        if len(values) not in (0, count):
            raise click.UsageError(f"--{option} is given {len(values)} times for {count} endpoints; give one for each")
        return checked_endpoint(values[index], f"--{option}") if values else None

    status, snapshot = own("status"), own("snapshot")
    if status is not None and snapshot is None:
        raise click.UsageError("--status needs --snapshot too, to repair a difference")
    events = checked_endpoint(endpoint, "ENDPOINT")
    name = endpoint.removeprefix("tcp://")
    return Source(name, events, own("replay"), status, snapshot, stream.topic, stream.model, _curve(stream))


def _curve(stream: StreamOptions) -> CurveClient | None:
    server, secret = stream.curve_server, stream.curve_secret
    if (server is None) != (secret is None):
        raise click.UsageError("give both --curve-server, the engine's public key, and --curve-secret, your own")
    try:
        return load_curve_client(server, secret) if server is not None and secret is not None else None
    except ValueError as error:
        raise click.UsageError(str(error)) from error


class _LoadResponse(Struct):
    model: str
    topic: str | None = None
    endpoints: EventEndpoints | None = None


def source_at(url: str) -> Source:
    """Return all sockets of a replica, at its URL with or without /v1; raise a click error if it has none."""
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(API_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.get(f"{url}/load", headers=headers, timeout=HTTP_TIMEOUT_S, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise click.UsageError(f"nothing answers at {url}: {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise click.UsageError(f"the replica at {url} requires a key; set {API_KEY}")
    try:
        said = msgspec.json.decode(answer.content, type=_LoadResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"{url} is not a warmroute replica; name the socket of its events, tcp://HOST:PORT"
        ) from error
    if said.endpoints is None:
        raise click.UsageError(f"the replica at {url} sends no events, or has not started yet")
    found = said.endpoints
    name = url.partition("://")[2]
    return Source(name, found.events, found.replay, found.status, found.snapshot, said.topic or "", said.model)
