"""`warmroute events record`."""

from collections.abc import Sequence

import click
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from events.recording import Recorder
from events.tool.options import StreamOptions, for_option, json_option, open_targets, stream_options
from events.tool.output import Output, count
from events.tool.streams import Stream, follow


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="ENDPOINT...")
@click.option("-o", "--output", "path", required=True, metavar="FILE", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@stream_options
@for_option
@json_option
def record(
    targets: tuple[str, ...], path: str, force: bool, stream: StreamOptions, for_s: float | None, as_json: bool
) -> None:
    """Record streams to a file: every message of all sockets, with its arrival time.

    A recording holds prompts as token ids, and is created readable by you alone. One of a mirror (warmroute events
    mirror) holds keys of blocks instead, so it may be shared. What a crash cuts off is lost, the rest stays readable;
    at most a second is in memory.

    \b
    Examples:
      warmroute events record tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 -o incident.wre
      warmroute events record tcp://a:5557 tcp://b:5557 -o both.wre --for 3600
    """
    opened = open_targets(targets, stream)
    if file := next((target.name for target in opened if target.recording is not None), None):
        raise click.UsageError(f"{file} is a recording already; give ENDPOINTs to record")
    output, streams = Output(as_json), [Stream(target, source) for target in opened for source in target.sources]
    try:
        with Recorder(path, [stream.source for stream in streams], force=force) as recorder:
            for index, one in enumerate(streams):
                one.received = recorder.tap(index)  # type: ignore[method-assign, assignment]
            if as_json:
                follow(streams, limit_s=for_s, every=recorder.flush_if_due)
            else:
                output.note(f"recording to {path}; Ctrl-C ends it")
                with Live(console=output.console, refresh_per_second=4, transient=True) as live:

                    def every() -> None:
                        recorder.flush_if_due()
                        live.update(Text(_sentence(recorder, _counts(streams))))

                    follow(streams, limit_s=for_s, every=every)
        counted = _counts(streams)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        output.line(
            {"file": str(recorder.path), "bytes": recorder.written_bytes, "records": recorder.records, **counted}
        )
    else:
        output.show(Text(_sentence(recorder, counted)))


def _counts(streams: Sequence[Stream]) -> dict[str, int]:
    stats = [stream.view.stream.stats for stream in streams]
    return {
        "batches": sum(own.batches for own in stats),
        "stored_blocks": sum(stream.view.resolver.stats.stored_blocks for stream in streams),
        "gaps": sum(own.gaps for own in stats),
        "lost_batches": sum(own.lost_batches for own in stats),
    }


def _sentence(recorder: Recorder, counted: dict[str, int]) -> str:
    parts = [count(recorder.records, "record"), decimal(recorder.written_bytes)]
    parts[:0] = [count(counted["batches"], "batch"), count(counted["stored_blocks"], "stored block")]
    parts += [count(counted["gaps"], "gap"), f"{counted['lost_batches']:,} lost"]
    return f"{recorder.path}: {', '.join(parts)}"
