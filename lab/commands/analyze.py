"""The command `warmroute analyze`."""

from pathlib import Path
from typing import Any

import click
import msgspec

from api.process.options import option
from api.process.settings import FiniteRange, Unusable
from fleet.display import progress
from lab.size import CONFIGS, config_of
from lab.trace.formats import is_log, read_log, read_trace
from lab.trace.requests import too_short
from replica.model.sizing import kv_bytes_per_token

SHARE = FiniteRange(min=0, max=1, min_open=True)
RATE = FiniteRange(min=1e-3, max=1e9)
COUNT = click.IntRange(1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("path", metavar="FILE", type=FILE)
@option(
    "--target-hit-rate", "SHARE", "The cache for this share of what can hit.", name="target", type=SHARE, default=0.9
)
@option("--capacity-tokens", "C", "The hit rate of a cache of this size, and what host memory adds.", type=COUNT)
@option(
    "--prefill-rate", "R", "Tokens/s that a replica prefills.", name="prefill_tokens_per_s", type=RATE, default=8000.0
)
@option("--load-rate", "R", "Tokens/s loaded from host memory.", name="load_tokens_per_s", type=RATE, default=100_000.0)
@option("--kv-bytes-per-token", "N", "To show caches in GB.", name="kv_bytes", type=COUNT)
@option("--model", "NAME", f"Instead: a folder with a config.json, or one of {', '.join(CONFIGS)}.")
@option("--block-tokens", "N", "Of the trace, if it cannot be found out.", type=COUNT)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def analyze(
    path: Path, kv_bytes: int | None, model: str | None, block_tokens: int | None, as_json: bool, **options: Any
) -> None:
    """Analyze a trace or a request log: how much prompts share, what cache that takes, what breaks it.

    FILE is JSON lines, plain or gzipped: Mooncake's (timestamp, input_length, output_length, hash_ids), or a request
    log (warmroute router --request-log). With --log-prompts a log has the prompts' text, too; then this finds what
    makes prompts differ early: times and ids, JSON keys and tools in another order, changed history, variable text
    before constant text, a cache_salt for each request.

    Hit rates are tokens found / tokens of all prompts, exactly those of the engine's block pool with one request at
    a time. An unlimited cache finds everything that can hit.

    \b
    Examples:
      warmroute analyze requests.log
      warmroute analyze conversation.jsonl --target-hit-rate 0.95 --model llama-3-8b
      warmroute analyze batch.jsonl --capacity-tokens 400000

    Exit status: 0 analyzed, with or without findings, 2 the file or a value cannot be used.
    """
    if kv_bytes is not None and model is not None:
        raise Unusable("--kv-bytes-per-token and --model both say how large a token is; give one of them")
    if model is not None:
        config = config_of(model)
        kv_bytes = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)
    from lab.analysis.analysis import AnalysisOptions, analysis_of, lines
    from lab.analysis.breaks.prompts import read_prompts

    chosen = AnalysisOptions(kv_bytes_per_token=kv_bytes, **options)
    size = path.stat().st_size
    with progress("reading blocks", size) as tell:
        trace = read_trace(path, block_tokens, tell)
    with progress("reading prompts", size) as tell:
        read = read_prompts(read_log(path, tell)) if is_log(path) else None
    longest = max(-(-request.input_tokens // trace.block_tokens) for request in trace.requests)
    if chosen.capacity_tokens is not None and chosen.capacity_tokens // trace.block_tokens < longest:
        blocks = f"{chosen.capacity_tokens // trace.block_tokens:,} blocks of {trace.block_tokens}"
        raise Unusable(
            f"--capacity-tokens {chosen.capacity_tokens:,} is {blocks}, and the longest prompt takes {longest:,}; "
            f"give {longest * trace.block_tokens:,} or more"
        )
    if (why := too_short(trace)) is not None:
        click.echo(f"Note: {why}", err=True)
    with progress("analyzing", 1):
        found = analysis_of(trace, read, chosen)
    click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(lines(found)))
