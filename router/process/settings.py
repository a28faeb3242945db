"""The router's settings.

A new setting is one row in SETTINGS: its key `some_key` is `--some-key` on the command line, `WARMROUTE_SOME_KEY` in
the environment and `some_key` in the file (`api.process.options`). With `flag=False` it has no option:
`--set some_key=...` gives it. `router.process.configure` builds the configuration from them.
A test compares the rows with the fields of RouterConfig.
"""

from typing import Any, get_args

import click

from api.process.settings import (
    ABOVE_0,
    AT_LEAST_0,
    COUNT,
    FILE,
    LARGEST,
    SPECIAL_TOKENS_IN_TEXT,
    TEXT,
    FiniteRange,
    Setting,
    Table,
)
from engines import PROFILES
from router.config import EXTENSION, GROUPS, MEGABYTE, Policy, RouterConfig
from router.placement.elsewhere import Mode
from router.process.setting_types import ADDRESS, ENDPOINT, SECRET, URL, ClientPath, Origin

NOT_IN_PS = "other users can see the command line."


def _row(
    key: str, type: click.ParamType[Any], help: str, *, field: str | None = None, metavar: str = "", **more: Any
) -> Setting:
    """A setting; its field usually has the key's name, perhaps with the unit seconds, and its metavar the type's."""
    if field is None:
        field = next((name for name in (key, f"{key}_s") if name in RouterConfig.__struct_fields__), "")
    number = "N" if isinstance(type, click.IntRange) else "SECONDS" if isinstance(type, FiniteRange) else ""
    return Setting(key, field, type, metavar or number or type.name.upper(), help, **more)


SETTINGS: dict[str, list[Setting]] = {
    "Replicas": [
        _row(
            "replica",
            TEXT,
            "A replica: its URL, or url=URL and facts that it does not report: name, model, engine (auto, "
            f"{', '.join(PROFILES)}), events, replay, topic, ... (docs/discovery.md). May be repeated.",
            metavar="URL|KEY=VALUE,...",
            multiple=True,
        ),
        _row("replicas_file", FILE, "A TOML file of replicas, one [[replicas]] each, reloaded on change."),
        _row("registry", URL, "Get the replicas from this registry, or a fleet."),
        _row("kubernetes_service", TEXT, "Use the pods behind this service as replicas.", metavar="NAME"),
        _row(
            "kubernetes_pods",
            TEXT,
            "Use the pods with these labels as replicas: app=model, or app in (a,b).",
            metavar="SELECTOR",
        ),
        _row(
            "kubernetes_pool",
            TEXT,
            "Use the pods of this InferencePool (Gateway API Inference Extension, v1) as replicas, at its port. Give "
            "only one of the three.",
            metavar="NAME",
        ),
        _row(
            "kubernetes_objectives",
            click.BOOL,
            "Give each request a class by the priority of the pool's InferenceObjective that it names.",
        ),
        _row("kubernetes_rewrites", click.BOOL, "Serve models under other names by the pool's InferenceModelRewrites."),
        _row(
            "kubernetes_group",
            click.Choice(GROUPS),
            "The API group of objectives and rewrites.",
            default=EXTENSION,
            metavar="GROUP",
            flag=False,
        ),
        _row(
            "kubernetes_namespace",
            TEXT,
            "Namespace of the service, the pods or the pool.  [default: the router's own]",
            metavar="NAME",
        ),
        _row(
            "kubernetes_api",
            URL,
            "URL of the API server, for example of `kubectl proxy`.  [default: the router's own cluster]",
        ),
        _row(
            "replica_api_key",
            SECRET,
            f"Send replicas this key. Better given as WARMROUTE_REPLICA_API_KEY: {NOT_IN_PS}",
            secret=True,
        ),
        _row("curve_server", FILE, "Public CURVE key of replicas without their own; their events are encrypted."),
        _row("curve_secret", FILE, "The router's secret CURVE key for them (see `warmroute events keygen`)."),
        _row(
            "expect_model",
            TEXT,
            "Let requests for this model wait for its first replica, and be ready without any: for pools that scale "
            "to zero. May be repeated.",
            metavar="MODEL",
            field="expected_models",
            multiple=True,
        ),
        _row(
            "model_rewrites",
            FILE,
            "TOML file with other names of models, read again when it changes.",
            field="model_rewrites_file",
        ),
        _row(
            "model_dir",
            TEXT,
            "Folder with a model's tokenizer and chat template; without them its prompts are matched only "
            "approximately. May be repeated.  [default of MODEL: DIR as it is written]",
            metavar="[MODEL=]DIR",
            multiple=True,
        ),
        _row(
            "chat_template",
            TEXT,
            "A chat template in Jinja, if replicas use another one than in --model-dir. May be repeated.  "
            "[default of MODEL: the model of the only --model-dir]",
            metavar="[MODEL=]FILE",
            multiple=True,
        ),
        SPECIAL_TOKENS_IN_TEXT,
    ],
    "HTTP": [
        _row("host", TEXT, "The address to listen on.", metavar="HOST"),
        _row("port", click.IntRange(0, 65535), "The port to listen on; 0: any free one.", metavar="PORT"),
        _row(
            "workers",
            click.IntRange(0, 64),
            "Processes that answer at this port; 0: one for each CPU, up to 4, or one with --peer-listen or "
            "--picker-listen.",
            metavar="N",
        ),
        _row("tls_cert", FILE, "Serve TLS with this certificate chain."),
        _row("tls_key", FILE, "The certificate's private key."),
        _row("max_body_bytes", COUNT, "The largest request body.", metavar="BYTES", flag=False),
        _row(
            "max_bodies_bytes",
            click.IntRange(1, 2**40),
            "Memory for all request bodies in progress; beyond it requests are refused with "
            "status 429. A quarter is kept for bodies of at most 1 MiB.",
            metavar="BYTES",
            flag=False,
        ),
        _row("max_connections", COUNT, "Maximum number of client connections.", flag=False),
        _row(
            "cors_origin",
            Origin(),
            "Allow requests from pages of this origin; *: any. May be repeated.",
            field="cors_origins",
            multiple=True,
        ),
        _row(
            "drain_delay",
            AT_LEAST_0,
            "How long to take requests after SIGTERM, while /ready fails and each answer closes its "
            "connection, so that load balancers notice.",
        ),
        _row("drain_timeout", AT_LEAST_0, "How long running requests may take to finish after that."),
        _row("die_with_parent", click.BOOL, "End when the parent process ends.", flag=False),
    ],
    "Access": [
        _row(
            "api_key",
            SECRET,
            f"Require this key from clients. May be repeated. Better given as WARMROUTE_API_KEY: {NOT_IN_PS}",
            multiple=True,
            secret=True,
        ),
        _row(
            "api_keys",
            FILE,
            "A TOML file of keys with names, limits and groups, reloaded within a second of a change.",
            field="api_keys_file",
        ),
        _row(
            "admin_key",
            SECRET,
            "Require this key for changing replicas and reading decisions. Better given as "
            "WARMROUTE_ADMIN_KEY.  [default: only clients on this machine]",
            secret=True,
        ),
        _row(
            "client_path",
            ClientPath(),
            "Open this path below /v1 to clients; by default only administrators may request it. May be repeated.",
            field="client_paths",
            multiple=True,
            flag=False,
        ),
    ],
    "Choosing": [
        _row("policy", click.Choice(get_args(Policy)), f"{', '.join(get_args(Policy))}.", metavar="NAME"),
        _row(
            "replica_limit",
            click.IntRange(0, LARGEST),
            "Maximum number of requests at one replica, this router's and its peers'; 0: no limit.",
        ),
        _row(
            "queue_size",
            click.IntRange(0, LARGEST),
            "Maximum number of requests waiting for room; more are refused with status 429.",
        ),
        _row("queue_timeout", AT_LEAST_0, "How long a request may wait there."),
        _row(
            "optimistic_ttl",
            AT_LEAST_0,
            "How long a prompt counts as cached where it was sent, until events confirm it.",
            flag=False,
        ),
        _row(
            "message_cache_mb",
            FiniteRange(0, LARGEST),
            "Memory for the token ids of messages seen before, for each model.",
            metavar="MB",
            default=RouterConfig().message_cache_bytes / MEGABYTE,
            flag=False,
        ),
        _row(
            "accuracy_objective",
            FiniteRange(0, 1),
            "Share of answers whose cached tokens must match the prediction.",
            metavar="FRACTION",
            flag=False,
        ),
        _row(
            "prefill_elsewhere",
            click.Choice(get_args(Mode)),
            "Let a replica with the role prefill compute a prompt for one that generates: auto, where that saves "
            "waiting; always, where it can; never.",
            metavar="auto|always|never",
            flag=False,
        ),
        _row(
            "pass_kv_transfer_params",
            click.BOOL,
            "Pass on clients' kv_transfer_params, ec_transfer_params and SGLang's bootstrap_*, which can name any "
            "host, instead of removing them.",
            flag=False,
        ),
    ],
    "Other routers": [
        _row(
            "peer_listen",
            ENDPOINT,
            "Tell other routers at this endpoint what is sent where: tcp://HOST:PORT. Beyond 127.0.0.1 it needs "
            "--peer-keys.",
        ),
        _row(
            "peer",
            ENDPOINT,
            "Count what this router sends, too. A name with several addresses stands for all of them. May be repeated.",
            field="peers",
            multiple=True,
        ),
        _row(
            "peer_keys",
            FILE,
            "The secret CURVE key of all these routers: what they tell is encrypted, and nobody else may tell or hear "
            "(see `warmroute events keygen`).",
        ),
    ],
    "Gateways": [
        _row(
            "picker_listen",
            ADDRESS,
            "Pick endpoints for gateways at this address, by Envoy's external processing over gRPC: HOST:PORT. It "
            "serves TLS with --tls-cert.",
        ),
        _row(
            "picker_fallbacks",
            click.IntRange(0, 10),
            "Name so many more replicas for each request, in the order in which a gateway should retry. A cluster of "
            "the type ORIGINAL_DST takes none.",
            flag=False,
        ),
    ],
    "Failure": [
        _row("resume", click.BOOL, "Continue an answer on another replica if its own is lost.", flag=False),
        _row("connect_timeout", ABOVE_0, "Time limit for connecting to a replica.", flag=False),
        _row(
            "first_token_timeout",
            ABOVE_0,
            "How long an answer may take to begin, waiting and prefill included; without streaming, the whole answer.",
            flag=False,
        ),
        _row("idle_timeout", ABOVE_0, "How long a replica or client may then be silent.", flag=False),
        _row("health_interval", ABOVE_0, "How often to check replicas' health.", flag=False),
        _row("breaker_faults", COUNT, "Consecutive faults that stop new requests.", flag=False),
        _row("slow_start", AT_LEAST_0, "How long a recovered replica gets fewer requests.", flag=False),
    ],
    "What it tells": [
        _row("decisions", click.IntRange(0, 10**6), "Decisions to keep for GET /decisions.", flag=False),
        _row(
            "recent_prompts",
            click.IntRange(0, 20_000),
            "Number of prompts whose prefixes are kept for GET /prefixes; fewer if they are long.",
            flag=False,
        ),
        _row(
            "show_prompts",
            click.BOOL,
            "Also keep and show the first words of these prefixes.  [default: unless clients have keys]",
        ),
        _row("access_log", TEXT, "Write a line of JSON for each request; -: to stdout.", metavar="FILE|-"),
        _row(
            "request_log",
            TEXT,
            "Write a line of JSON for each generation request, with the basis of its decisions; -: to stdout.",
            metavar="FILE|-",
        ),
        _row("log_prompts", click.BOOL, "Include request bodies in the request log."),
        _row(
            "usage_db",
            TEXT,
            "Keep the usage of each key, and what is used of its day's budget, in this SQLite file, made if it is "
            "not there.  [default: in memory, since the start]",
            metavar="FILE",
        ),
        _row("usage_days", click.IntRange(1, 10_000), "Number of days to keep usage for.", flag=False),
        _row(
            "metrics_keys",
            click.IntRange(0, 1000),
            "Number of keys with counters of their own in /metrics: those with most tokens.",
            flag=False,
        ),
        _row(
            "price_per_million_tokens",
            ABOVE_0,
            "Price of a million computed prompt tokens, in any currency: the dashboard shows how much caches saved.  "
            "[default: none]",
            metavar="PRICE",
            flag=False,
        ),
        _row("otlp_endpoint", URL, "Send traces and GenAI metrics to this endpoint, by OTLP over HTTP."),
        _row(
            "log_level",
            click.Choice(["debug", "info", "warning", "error"]),
            "debug, info, warning or error.",
            metavar="LEVEL",
        ),
    ],
}

TABLE = Table("warmroute router", SETTINGS, RouterConfig())
PICKER_TABLE = Table("warmroute picker", SETTINGS, RouterConfig(picker_listen="127.0.0.1:9002"))
