"""`warmroute shadow`: beside another router, what warmroute would have gained."""

import logging
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import click
import msgspec

from api.process.options import SettingsCommand, option
from api.process.settings import FiniteRange, Setting, Table, Unusable
from lab.commands.common import counting
from router.config import RouterConfig
from router.process.configure import config_of
from router.process.settings import SETTINGS, TABLE

CHOOSING = ("policy", "message_cache_mb")
INPUT = click.Path(exists=True, dir_okay=False, allow_dash=True)
INTERVAL, RATE = FiniteRange(min=0.2, max=3600), FiniteRange(min=1e-3, max=1e9)
TOKENS = click.IntRange(1, 10**12)
COPIES = ("max_body_bytes", "max_bodies_bytes", "max_connections")


def _rows(*keys: str) -> list[Setting]:
    return [TABLE.all[key] for key in keys]


SHADOW = Table(
    "warmroute shadow",
    {"Replicas": SETTINGS["Replicas"], "Choosing": _rows(*CHOOSING), "Copies of requests": _rows(*COPIES)},
    RouterConfig(),
)


@click.command(cls=SettingsCommand, table=SHADOW)
@option("--requests", "FILE|-", "Requests with their bodies, one JSON object per line; -: standard input.", type=INPUT)
@option("--listen", "HOST:PORT", "Take copies of requests here, over HTTP.")
@option(
    "--interval",
    "SECONDS",
    "How often to print a line.",
    name="interval_s",
    type=INTERVAL,
    default=5.0,
    show_default="5",
)
@option("--capacity-tokens", "C", "Tokens of KV cache in each replica.  [default: as the replicas tell]", type=TOKENS)
@option(
    "--prefill-rate",
    "R",
    "Tokens/s that a replica prefills.  [default: as they tell]",
    name="prefill_tokens_per_s",
    type=RATE,
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def shadow(
    requests: str | None,
    listen: str | None,
    interval_s: float,
    capacity_tokens: int | None,
    prefill_tokens_per_s: float | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Stand beside a router that runs already, and tell what warmroute would have decided and gained.

    It follows the cache events of the replicas, and takes the requests that they get: from a file or standard input
    (the request log of warmroute router --log-prompts is one), or as copies over HTTP, which nginx, Envoy and
    gateways call mirroring. It never sends a request to a model. Ctrl-C, or the end of the input, prints the report.

    \b
    Examples:
      warmroute shadow --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000 --listen 0.0.0.0:8900
      warmroute shadow --replicas-file replicas.toml --requests requests.jsonl
      zcat requests.jsonl.gz | warmroute shadow --replicas-file replicas.toml --requests - --json

    Exit status: 0 a report was printed, 1 it ended before there was anything to report, 2 an invalid value.
    """
    if requests is None and listen is None:
        raise Unusable("there are no requests to watch; give --listen HOST:PORT, or --requests FILE")
    config = config_of(settings)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    import uvloop

    from api.http.server import listen as listen_at
    from lab.shadow.findings import findings, lines  # a web framework: not needed to refuse a setting
    from lab.shadow.twin import FIT_RUNS, RUNS
    from lab.shadow.watch import Wanted, watched

    listener = None
    if listen is not None:
        where = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):([0-9]{1,5})", listen)
        if where is None or int(where[2]) > 65535:
            raise Unusable(f"--listen: {listen!r} is not HOST:PORT, such as 127.0.0.1:8900")
        try:
            listener = listen_at(where[1].strip("[]"), int(where[2]))
        except OSError as error:
            raise Unusable(f"--listen: cannot listen on {listen}: {error.strerror or error}") from error
    wanted = Wanted(config=config, requests=requests, listener=listener, interval_s=interval_s)
    with nullcontext() if listener is None else listener:
        seen = uvloop.run(watched(wanted, partial(click.echo, err=True)))
    if seen is None:
        return 1
    with counting("simulating", (RUNS + FIT_RUNS) * len(seen.placing.records)) as on_request:
        found = findings(
            seen,
            config.policy,
            capacity_tokens=capacity_tokens,
            prefill_tokens_per_s=prefill_tokens_per_s,
            on_request=on_request,
        )
    click.echo(msgspec.json.encode(found) if as_json else "\n".join(lines(found)))
    return 0
