"""`warmroute prove`: holds what a router and its engines say of their caches against the engines' events."""

import time
from pathlib import Path
from typing import IO, Any

import click
import msgspec
from msgspec.structs import replace

from api.process.options import SettingsCommand, option
from api.process.settings import Table, Unusable
from fleet.commands.addresses.address import Address
from fleet.display import progress
from lab.bench.workloads import WORKLOADS, at_once, conversations, replayed
from lab.trace.formats import read_trace
from router.config import RouterConfig
from router.process.configure import config_of
from router.process.setting_types import SECRET
from router.process.settings import SETTINGS

FLAGS = ("replica", "replicas_file", "replica_api_key", "model_dir")
ROWS = [row._replace(flag=row.key in FLAGS) for row in SETTINGS["Replicas"]]
STATUS = {"proved": 0, "refuted": 1, "unknown": 3}
WORDS = f"{', '.join(WORKLOADS)}, or a file: a trace or a router's request log, at its times."
USUAL_REQUESTS, USUAL_CLIENTS, THINK_S = 200, 4, 0.2


@click.command(cls=SettingsCommand, table=Table("warmroute prove", {"Replicas": ROWS}, RouterConfig()))
@click.argument("url", type=Address())
@option("--model", "NAME", "The model.  [default: the only one that is served]")
@option("--workload", "NAME|FILE", WORDS, default="multi-turn")
@option("--requests", "N", f"How many.  [default: {USUAL_REQUESTS}; all of a file]", type=click.IntRange(1))
@option("--concurrency", "C", f"Clients.  [default: {USUAL_CLIENTS}; a file's times]", type=click.IntRange(1, 512))
@option("--api-key", "KEY", "Send this key. Better given as OPENAI_API_KEY.", type=SECRET, envvar="OPENAI_API_KEY")
@option("-o", "FILE", "Write the evidence here, one JSON object per answer.", name="output", type=click.File("wb"))
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as one JSON object.")
def prove(
    url: str,
    model: str | None,
    workload: str,
    requests: int | None,
    concurrency: int | None,
    api_key: str | None,
    output: IO[bytes] | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Send requests through any router, and prove from the engines' events what was cached, and what was lost.

    It follows the events of the replicas behind the router: of those given, or of those that a router of warmroute
    names. What answers tell (cached_tokens), what the router predicted and what the engines count is held against the
    events, request by request. Nothing else should use the replicas meanwhile.

    \b
    Examples:
      warmroute prove 8000
      warmroute prove 10.0.0.9:30000 --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000 -o proof.jsonl
      warmroute prove 8000 --workload requests.jsonl --json

    Exit status: 0 proved, 1 refuted, 2 a value cannot be used, or somebody does not answer, 3 too little is known.
    """
    config = config_of(settings)
    import uvloop

    from lab.bench.load import Limits  # HTTP clients: not needed to refuse a setting
    from lab.bench.measure import Plan
    from lab.bench.probe import RequestSettings, target_of
    from lab.shadow.proof import lines, proved
    from router.console.asking import Client
    from router.members.spec import ReplicaSpec
    from router.responses import ReplicaList

    try:
        replay = None if workload in WORKLOADS else read_trace(Path(workload))
    except OSError as error:
        raise Unusable(f"--workload: cannot read {workload!r}: {error.strerror or error}") from error
    count = requests or (USUAL_REQUESTS if replay is None else len(replay.requests))
    plan = Plan(
        target=target_of(url),
        wish=RequestSettings(model, f"{time.time_ns()}"),  # nothing is cached from an earlier run
        arrivals=lambda seed: at_once(conversations(workload, seed, THINK_S)) if replay is None else replayed(replay),
        limits=Limits(count, clients=concurrency or (USUAL_CLIENTS if replay is None else None)),
        key=api_key,
    )
    with Client(plan.target.url, api_key) as router, progress(f"asking {plan.target.url}", count) as tell:
        if not (config.replicas or config.replicas_file or config.registry or config.kubernetes):
            try:
                known = router.get("/replicas", ReplicaList).replicas
            except click.ClickException as error:
                raise Unusable(f"give --replica for each replica behind it: {error.message}") from error
            names = {one.url: one.name for one in reversed(known) if one.url}
            config = replace(config, replicas=tuple(ReplicaSpec(name=name, url=at) for at, name in names.items()))
        certificate, evidence = uvloop.run(proved(plan, config, tell))
    if output is not None:
        output.writelines(msgspec.json.encode(one) + b"\n" for one in evidence)
    click.echo(msgspec.json.encode(certificate) if as_json else "\n".join(lines(certificate)))
    return STATUS[certificate.verdict]
