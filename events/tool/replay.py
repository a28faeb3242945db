"""`warmroute events replay`."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import zmq
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from events.publisher import is_local
from events.recording.player import Player, PlayerConfig
from events.recording.recording import Recording
from events.source import Source
from events.tool.options import Moment, MomentType, StreamOptions, checked_endpoint, json_option, open_target
from events.tool.output import Output, count, plain


def _speed(_: click.Context, __: click.Parameter, value: str) -> float | None:
    if value == "max":
        return None
    try:
        speed = float(value)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise click.BadParameter(f"{value!r} is neither a number above 0 nor 'max'")
    return speed


@click.command()
@click.argument("file")
@click.option("--bind", required=True, metavar="ENDPOINT", help="Where to publish the events.")
@click.option("--replay-bind", metavar="ENDPOINT", help="Where to answer replay requests.")
@click.option("--status-bind", metavar="ENDPOINT", help="Where to publish the recorded status (warmroute replicas).")
@click.option("--snapshot-bind", metavar="ENDPOINT", help="Where to answer snapshot requests (hashes that are keys).")
@click.option("--source", "name", metavar="NAME", help="Which source, if the recording has several.")
@click.option(
    "--speed", callback=_speed, default="1", show_default=True, metavar="N|max", help="N times as fast as recorded."
)
@click.option(
    "--from", "start", type=MomentType(), help="Where to begin: 1234 (a batch), +12.5 (seconds) or an ISO time."
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait for the first subscriber.")
@click.option("--loop", is_flag=True, help="Start over at the end, until Ctrl-C; subscribers see a restart.")
@click.option(
    "--stay",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to keep answering requests at the end.",
)
@json_option
def replay(
    file: str,
    bind: str,
    replay_bind: str | None,
    status_bind: str | None,
    snapshot_bind: str | None,
    name: str | None,
    speed: float | None,
    start: Moment | None,
    wait: bool,
    loop: bool,
    stay: float,
    as_json: bool,
) -> None:
    """Publish a recording again, with the original topics, sequence numbers and bytes.

    Use it to test a consumer against yesterday's incident: gaps are gaps again, and the replay socket has what the
    recorder got. Batches before --from are not published, but can be replayed. With --snapshot-bind a recording of a
    warmroute replica, or a redacted one, answers snapshot requests.

    \b
    Examples:
      warmroute events replay incident.wre --bind tcp://127.0.0.1:5557 --replay-bind tcp://127.0.0.1:5558
      warmroute events replay incident.wre --bind tcp://127.0.0.1:5557 --speed 10 --from +90
      warmroute events replay incident.wre --bind tcp://127.0.0.1:5557 --speed max --no-wait --stay 0
    """
    output = Output(as_json)
    opened = open_target(file, StreamOptions())
    recording = opened.recording
    if recording is None:
        raise click.UsageError(f"{file} is an endpoint; replay publishes a recording")
    source = opened.chosen(name, "--source")
    binds = {
        "--bind": bind,
        "--replay-bind": replay_bind,
        "--status-bind": status_bind,
        "--snapshot-bind": snapshot_bind,
    }
    for option, endpoint in binds.items():
        if endpoint is not None:
            checked_endpoint(endpoint, option, bind=True)
            if not is_local(endpoint) and not recording.header.redacted:
                output.note(f"{endpoint} can be read by anyone who reaches it, and the recording holds prompts")
    offset = _offset(recording, source, start) if start else 0
    try:
        player = Player(recording, source, PlayerConfig(bind, replay_bind, status_bind, snapshot_bind, speed))
    except zmq.ZMQError as error:
        raise click.ClickException(str(error)) from error
    for damage in recording.damage:
        output.note(f"{opened.name}: {damage}")
    with player:
        finished = _play(player, offset, wait, loop, stay, output)
        _report(player, finished, output)


def _play(player: Player, offset: int, wait: bool, loop: bool, stay: float, output: Output) -> bool:
    """Play to the end (True), or until Ctrl-C or SIGTERM (False)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        output.note(f"publishing at {', '.join(player.endpoints)}")
        if wait:
            output.note("waiting for a subscriber (--no-wait begins at once)")
            player.wait_for_subscriber()
        while True:
            with _progress(player, output) as progress:
                player.play(offset, progress)
            if not loop:
                break
        player.stay(stay)
    except KeyboardInterrupt:
        return False
    return True


def _report(player: Player, finished: bool, output: Output) -> None:
    if output.json:
        output.line({"finished": finished, **plain(player.stats)})
        return
    stats = player.stats
    end = "the end of the recording" if finished else "stopped"
    output.show(
        f"{end}: {count(stats.batches, 'batch')} published, {count(stats.replays, 'replay')} and "
        f"{count(stats.snapshots, 'snapshot')} answered"
    )


@contextmanager
def _progress(player: Player, output: Output) -> Iterator[Callable[[], None] | None]:
    if output.json:
        yield None
        return
    columns = (BarColumn(), TextColumn("{task.completed:,} of {task.total:,} batches"), TimeRemainingColumn())
    with Progress(*columns, console=output.console, transient=True) as bar:
        task = bar.add_task("", total=player.batches)
        shown_s = 0.0

        def progress() -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s > 0.1:
                shown_s = time.monotonic()
                bar.update(task, completed=player.position)

        yield progress


def _offset(recording: Recording, source: Source, start: Moment) -> int:
    """The offset in the file that a `--from` points to."""
    if start.seq is not None:
        found = recording.find(seq=start.seq, source=recording.sources.index(source))
    else:
        after_s = recording.header.created + start.after_s if start.after_s is not None else None
        found = recording.find(at_time=start.time_s if after_s is None else after_s)
    if found >= recording.size:
        raise click.UsageError("--from is after the end of the recording")
    return found
