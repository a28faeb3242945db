"""`warmroute events record`."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.live import Live
from rich.text import Text

from events.recording.recording import BadRecording, Recorder, redacted_copy
from events.tool.options import StreamOptions, Target, for_option, json_option, open_targets, stream_options
from events.tool.output import Output, count, size
from events.tool.streams import Stream, follow
from events.view import CacheView


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="ENDPOINT...")
@click.option("-o", "--output", "path", required=True, metavar="FILE", help="The file to write.")
@click.option("--redact", is_flag=True, help="Leave out token ids, salts and names; keep keys and structure.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@stream_options
@for_option
@json_option
def record(
    targets: tuple[str, ...],
    path: str,
    redact: bool,
    force: bool,
    stream: StreamOptions,
    for_s: float | None,
    as_json: bool,
) -> None:
    """Record streams to a file: every message of all sockets, with its arrival time.

    A recording holds prompts as token ids, and is created readable by you alone. With --redact it holds none: block
    keys and structure stay, so that tree, stat and diff work as before. A recording (FILE) in place of ENDPOINT is
    copied with --redact. What a crash cuts off is lost, the rest stays readable; at most a second is in memory (with
    --redact some more).

    \b
    Examples:
      warmroute events record tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 -o incident.wre
      warmroute events record tcp://a:5557 tcp://b:5557 -o both.wre --for 3600
      warmroute events record incident.wre --redact -o shareable.wre
    """
    opened = open_targets(targets, stream)
    output = Output(as_json)
    try:
        if any(target.recording is not None for target in opened):
            _copy(opened, path, redact, force, output)
        else:
            streams = [Stream(target, source) for target in opened for source in target.sources]
            sources = [stream.source for stream in streams]
            with Recorder(path, sources, redact=redact, force=force) as recorder:
                _record(recorder, streams, for_s, output)
            views = [stream.view for stream in streams]
            _report(recorder, views, output)
    except BrokenPipeError:
        raise
    except (OSError, BadRecording) as error:
        raise click.ClickException(str(error)) from error


def _record(recorder: Recorder, streams: Sequence[Stream], for_s: float | None, output: Output) -> None:
    for index, stream in enumerate(streams):
        stream.received = recorder.tap(index)  # type: ignore[method-assign, assignment]
    if output.json:
        follow(streams, limit_s=for_s, every=recorder.flush_if_due)
        return
    output.note(f"recording to {recorder.path}; Ctrl-C ends it")
    with Live(console=output.console, refresh_per_second=4, transient=True) as live:

        def every() -> None:
            recorder.flush_if_due()
            live.update(Text(_sentence(recorder, [stream.view for stream in streams])))

        follow(streams, limit_s=for_s, every=every)


def _copy(targets: list[Target], path: str, redact: bool, force: bool, output: Output) -> None:
    recording = targets[0].recording
    if len(targets) > 1 or recording is None:
        raise click.UsageError("give either one FILE to copy, or ENDPOINTs to record")
    if not redact:
        raise click.UsageError("copying a recording needs --redact; for an exact copy use cp")
    if Path(path).exists() and Path(path).samefile(recording.path):
        raise click.UsageError(f"{path} would be copied onto itself; name another file with -o")
    recorder = redacted_copy(recording, path, force=force)
    for damage in recording.damage:
        output.note(f"{recording.path}: {damage}")
    _report(recorder, [], output)


def _report(recorder: Recorder, views: Sequence[CacheView], output: Output) -> None:
    if output.json:
        counted = {"file": str(recorder.path), "bytes": recorder.written_bytes, "records": recorder.records}
        output.line({**counted, **_counts(views)} if views else counted)
    else:
        output.show(Text(_sentence(recorder, views)))


def _counts(views: Sequence[CacheView]) -> dict[str, int]:
    return {
        "batches": sum(view.stream.stats.batches for view in views),
        "stored_blocks": sum(view.resolver.stats.stored_blocks for view in views),
        "gaps": sum(view.stream.stats.gaps for view in views),
        "lost_batches": sum(view.stream.stats.lost_batches for view in views),
    }


def _sentence(recorder: Recorder, views: Sequence[CacheView]) -> str:
    """Return one line about the recording so far."""
    parts = [count(recorder.records, "record"), size(recorder.written_bytes)]
    if views:
        counted = _counts(views)
        parts[:0] = [count(counted["batches"], "batch"), count(counted["stored_blocks"], "stored block")]
        parts += [count(counted["gaps"], "gap"), f"{counted['lost_batches']:,} lost"]
    return f"{recorder.path}: {', '.join(parts)}"
