"""The router's settings.

A new setting is one row in SETTINGS: its key `some_key` is `--some-key` on the command line, `WARMROUTE_SOME_KEY` in
the environment and `some_key` in the file (`api.process.options`). Those of `_key` have no option:
`--set some_key=...` gives them. `router.process.configure` builds the configuration from them.
A test compares the rows with the fields of RouterConfig.
"""

from functools import partial
from typing import Any, get_args

import click

from api.process.settings import (
    ABOVE_0,
    AT_LEAST_0,
    COUNT,
    FILE,
    LARGEST,
    TEXT,
    FiniteRange,
    Setting,
    Table,
)
from engines import PROFILES
from router.config import MEGABYTE, Policy, RouterConfig
from router.placement.elsewhere import Mode
from router.process.setting_types import ADDRESS, CLIENT_PATH, ENDPOINT, SECRET, URL, Origin

NOT_IN_PS = "other users can see the command line."


def _row(type: click.ParamType[Any], help: str, *, field: str = "", metavar: str = "", **more: Any) -> Setting:
    """A setting, whose metavar is usually that of its type."""
    number = "N" if isinstance(type, click.IntRange) else "SECONDS" if isinstance(type, FiniteRange) else ""
    return Setting("", field, type, metavar or number or type.name.upper(), help, **more)


_key = partial(_row, flag=False)  # a setting without an option


def _group(**rows: Setting) -> list[Setting]:
    """Settings by their keys; the field of each usually has the key's name, perhaps with the unit seconds."""
    fields = {key.removesuffix("_s"): key for key in RouterConfig.__struct_fields__}
    return [row._replace(key=key, field=row.field or fields.get(key, "")) for key, row in rows.items()]


SETTINGS: dict[str, list[Setting]] = {
    "Replicas": _group(
        replica=_row(
            TEXT,
            "A replica: its URL, or url=URL and facts that it does not report: name, model, engine (auto, "
            f"{', '.join(PROFILES)}), events, replay, topic, ... (docs/discovery.md). May be repeated.",
            metavar="URL|KEY=VALUE,...",
            multiple=True,
        ),
        replicas_file=_row(FILE, "A TOML file of replicas, one [[replicas]] each, reloaded on change."),
        registry=_row(URL, "Get the replicas from this registry, or a fleet."),
        kubernetes_pods=_row(
            TEXT, "Use the pods with these labels as replicas: app=model, or app in (a,b).", metavar="SELECTOR"
        ),
        kubernetes_pool=_row(
            TEXT,
            "Use the pods of this InferencePool (Gateway API Inference Extension, v1) as replicas, at its port.",
            metavar="NAME",
        ),
        kubernetes_namespace=_row(
            TEXT, "Namespace of the pods or the pool.  [default: the router's own]", metavar="NAME"
        ),
        kubernetes_api=_row(
            URL, "URL of the API server, for example of `kubectl proxy`.  [default: the router's own cluster]"
        ),
        replica_api_key=_row(
            SECRET, f"Send replicas this key. Better given as WARMROUTE_REPLICA_API_KEY: {NOT_IN_PS}", secret=True
        ),
        curve_server=_row(FILE, "Public CURVE key of replicas without their own; their events are encrypted."),
        curve_secret=_row(FILE, "The router's secret CURVE key for them (see `warmroute events keygen`)."),
        expect_model=_row(
            TEXT,
            "Let requests for this model wait for its first replica, and be ready without any: for pools that scale "
            "to zero. May be repeated.",
            metavar="MODEL",
            field="expected_models",
            multiple=True,
        ),
        model_rewrites=_row(
            FILE, "TOML file with other names of models, read again when it changes.", field="model_rewrites_file"
        ),
        model_dir=_row(
            TEXT,
            "Folder with a model's tokenizer and chat template; without them its prompts are matched only "
            "approximately. May be repeated.  [default of MODEL: DIR as it is written]",
            metavar="[MODEL=]DIR",
            multiple=True,
        ),
        chat_template=_row(
            TEXT,
            "A chat template in Jinja, if replicas use another one than in --model-dir. May be repeated.  "
            "[default of MODEL: the model of the only --model-dir]",
            metavar="[MODEL=]FILE",
            multiple=True,
        ),
    ),
    "HTTP": _group(
        host=_row(TEXT, "The address to listen on.", metavar="HOST"),
        port=_row(click.IntRange(0, 65535), "The port to listen on; 0: any free one.", metavar="PORT"),
        workers=_row(
            click.IntRange(0, 64),
            "Processes that answer at this port; 0: one, and more while all are busy, up to one for each CPU and 4; "
            "one with --peer-listen or --picker-listen.",
            metavar="N",
        ),
        tls_cert=_row(FILE, "Serve TLS with this certificate chain."),
        tls_key=_row(FILE, "The certificate's private key."),
        max_body_bytes=_key(COUNT, "The largest request body.", metavar="BYTES"),
        max_bodies_bytes=_key(
            click.IntRange(1, 2**40),
            "Memory for all request bodies in progress; beyond it requests are refused with "
            "status 429. A quarter is kept for bodies of at most 1 MiB.",
            metavar="BYTES",
        ),
        max_connections=_key(COUNT, "Maximum number of client connections."),
        cors_origin=_row(
            Origin(),
            "Allow requests from pages of this origin; *: any. May be repeated.",
            field="cors_origins",
            multiple=True,
        ),
        drain_delay=_row(
            AT_LEAST_0,
            "How long to take requests after SIGTERM, while /ready fails and each answer closes its "
            "connection, so that load balancers notice.",
        ),
        drain_timeout=_row(AT_LEAST_0, "How long running requests may take to finish after that."),
        die_with_parent=_key(click.BOOL, "End when the parent process ends."),
    ),
    "Access": _group(
        api_key=_row(
            SECRET,
            f"Require this key from clients. May be repeated. Better given as WARMROUTE_API_KEY: {NOT_IN_PS}",
            multiple=True,
            secret=True,
        ),
        api_keys=_row(
            FILE,
            "A TOML file of keys with names, limits and groups, reloaded within a second of a change.",
            field="api_keys_file",
        ),
        admin_key=_row(
            SECRET,
            "Require this key for changing replicas and reading decisions. Better given as "
            "WARMROUTE_ADMIN_KEY.  [default: only clients on this machine]",
            secret=True,
        ),
        client_path=_key(
            CLIENT_PATH,
            "Open this path below /v1 to clients; by default only administrators may request it. May be repeated.",
            field="client_paths",
            multiple=True,
        ),
    ),
    "Choosing": _group(
        policy=_row(click.Choice(get_args(Policy)), f"{', '.join(get_args(Policy))}.", metavar="NAME"),
        replica_limit=_row(
            click.IntRange(0, LARGEST),
            "Maximum number of requests at one replica, this router's and its peers'; 0: no limit.",
        ),
        queue_size=_row(
            click.IntRange(0, LARGEST), "Maximum number of requests waiting for room; more are refused with status 429."
        ),
        queue_timeout=_row(AT_LEAST_0, "How long a request may wait there."),
        hold_sessions=_key(
            click.BOOL,
            "Let new sessions wait in that queue while the caches do not hold the contexts of those that have begun.",
        ),
        ask_engines=_key(click.BOOL, "Ask engines for the tokens of prompts that cannot be made here."),
        message_cache_mb=_key(
            FiniteRange(0, LARGEST),
            "Memory for the token ids of messages seen before, for each model.",
            metavar="MB",
            default=RouterConfig().message_cache_bytes / MEGABYTE,
        ),
        prefill_elsewhere=_key(
            click.Choice(get_args(Mode)),
            "Let a replica with the role prefill compute a prompt for one that generates: auto, where that saves "
            "waiting; always, where it can; never.",
            metavar="auto|always|never",
        ),
        pass_kv_transfer_params=_key(
            click.BOOL,
            "Pass on clients' kv_transfer_params, ec_transfer_params and SGLang's bootstrap_*, which can name any "
            "host, instead of removing them.",
        ),
    ),
    "Other routers": _group(
        peer_listen=_row(
            ENDPOINT,
            "Tell other routers at this endpoint what is sent where: ipc://PATH on this machine, or tcp://HOST:PORT, "
            "which needs --peer-keys.",
        ),
        peer=_row(
            ENDPOINT,
            "Count what this router sends, too. A name with several addresses stands for all of them. May be repeated.",
            field="peers",
            multiple=True,
        ),
        peer_keys=_row(
            FILE,
            "The secret CURVE key of all these routers: what they tell is encrypted, and nobody else may tell or hear "
            "(see `warmroute events keygen`).",
        ),
    ),
    "Gateways": _group(
        picker_listen=_row(
            ADDRESS,
            "Pick endpoints for gateways at this address, by Envoy's external processing over gRPC: HOST:PORT. It "
            "serves TLS with --tls-cert.",
        ),
    ),
    "Failure": _group(
        resume=_key(click.BOOL, "Continue an answer on another replica if its own is lost."),
        connect_timeout=_key(ABOVE_0, "Time limit for connecting to a replica."),
        first_token_timeout=_key(
            ABOVE_0,
            "How long an answer may take to begin, waiting and prefill included; without streaming, the whole answer.",
        ),
        idle_timeout=_key(ABOVE_0, "How long a replica or client may then be silent."),
        health_interval=_key(ABOVE_0, "How often to check replicas' health."),
        breaker_faults=_key(COUNT, "Consecutive faults that stop new requests."),
        slow_start=_key(AT_LEAST_0, "How long a recovered replica gets fewer requests."),
    ),
    "What it tells": _group(
        decisions=_key(click.IntRange(0, 10**6), "Decisions to keep for GET /decisions."),
        recent_prompts=_key(
            click.IntRange(0, 20_000),
            "Number of prompts whose prefixes are kept for GET /prefixes; fewer if they are long.",
        ),
        show_prompts=_row(
            click.BOOL, "Also keep and show the first words of these prefixes.  [default: unless clients have keys]"
        ),
        access_log=_row(TEXT, "Write a line of JSON for each request; -: to stdout.", metavar="FILE|-"),
        request_log=_row(
            TEXT,
            "Write a line of JSON for each generation request, with the basis of its decisions; -: to stdout.",
            metavar="FILE|-",
        ),
        log_prompts=_row(click.BOOL, "Include request bodies in the request log."),
        usage_db=_row(
            TEXT,
            "Keep the usage of each key, and what is used of its day's budget, in this SQLite file, made if it is "
            "not there.  [default: in memory, since the start]",
            metavar="FILE",
        ),
        usage_days=_key(click.IntRange(1, 10_000), "Number of days to keep usage for."),
        metrics_keys=_key(
            click.IntRange(0, 1000), "Number of keys with counters of their own in /metrics: those with most tokens."
        ),
        price_per_million_tokens=_key(
            ABOVE_0,
            "Price of a million computed prompt tokens, in any currency: the dashboard shows how much caches saved.  "
            "[default: none]",
            metavar="PRICE",
        ),
        otlp_endpoint=_row(URL, "Send traces to this endpoint, by OTLP over HTTP."),
        log_level=_row(
            click.Choice(["debug", "info", "warning", "error"]), "debug, info, warning or error.", metavar="LEVEL"
        ),
    ),
}

TABLE = Table("warmroute router", SETTINGS, RouterConfig())
PICKER_TABLE = Table("warmroute picker", SETTINGS, RouterConfig(picker_listen="127.0.0.1:9002"))
