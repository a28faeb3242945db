"""The router's settings.

A new setting is one row in SETTINGS: its key `some_key` is `--some-key` on the command line, `WARMROUTE_SOME_KEY` in
the environment and `some_key` in the file (`api.options`); `router.configure` builds the configuration from them.
A test compares the rows with the fields of RouterConfig.
"""

from typing import Any, get_args
from urllib.parse import urlsplit

import click

from api.errors import ApiError
from api.http.path import parse_path, raw_path
from api.settings import (
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
    Text,
)
from router.config import MEGABYTE, Policy, RouterConfig


class Url(Text):
    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url = super().convert(value, param, ctx)
        try:
            parts = urlsplit(url)
            complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of a port or an address
            complete = False
        if not complete or parts.username or parts.query or parts.fragment:
            self.fail(f"{url!r} is no URL; write http://HOST:PORT.", param, ctx)
        return url.rstrip("/")


class Origin(Url):
    name = "origin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "*":
            return "*"
        origin = super().convert(value, param, ctx)
        if urlsplit(origin).path:
            self.fail(f"{origin!r} has a path; write https://HOST, as browsers send it, or *.", param, ctx)
        return origin


class ClientPath(click.ParamType[str]):
    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        try:
            usual = raw_path(parse_path(path.encode())).decode() == path
        except ApiError:
            usual = False
        if not (usual and path.startswith("/v1/")):
            self.fail(f"{path!r} is no path below /v1/; write it as in /v1/videos.", param, ctx)
        return path


class Secret(click.ParamType[str]):
    """A key that fits into a header; it is never quoted."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not text or not all("!" <= letter <= "~" for letter in text):
            self.fail("The key is empty or has characters that no header can carry; use visible ASCII.", param, ctx)
        return text


URL = Url()
SECRET = Secret()
NOT_IN_PS = "everybody's ps shows the command line."

SETTINGS: dict[str, list[Setting]] = {
    "Replicas": [
        Setting(
            "replica",
            "",
            TEXT,
            "URL|KEY=VALUE,...",
            "A replica: its URL alone, or url=URL and what it cannot say itself: name, model, engine (auto, warmroute, "
            "vllm, sglang, openai), events, replay, topic, ... (docs/discovery.md). May be repeated.",
            multiple=True,
        ),
        Setting(
            "replicas_file",
            "replicas_file",
            FILE,
            "FILE",
            "A TOML file of replicas, one [[replicas]] for each. Changes count within a second.",
        ),
        Setting("registry", "registry", URL, "URL", "Ask this registry, that of a fleet, for the replicas."),
        Setting(
            "kubernetes_service",
            "",
            TEXT,
            "NAME",
            "The pods behind this service are the replicas.",
        ),
        Setting(
            "kubernetes_pods",
            "",
            TEXT,
            "SELECTOR",
            "The pods with these labels are the replicas: app=vllm, or app in (a,b). Not together with a service.",
        ),
        Setting(
            "kubernetes_namespace",
            "",
            TEXT,
            "NAME",
            "Where that service, or those pods, are.  [default: the router's own]",
        ),
        Setting(
            "kubernetes_api",
            "",
            URL,
            "URL",
            "The API server, as `kubectl proxy` offers it.  [default: that of the cluster the router runs in]",
        ),
        Setting(
            "replica_api_key",
            "replica_api_key",
            SECRET,
            "KEY",
            f"Send replicas this key. Better given as WARMROUTE_REPLICA_API_KEY: {NOT_IN_PS}",
            secret=True,
        ),
        Setting(
            "curve_server",
            "curve_server",
            FILE,
            "FILE",
            "The public CURVE key of replicas that name none: their events are encrypted.",
        ),
        Setting(
            "curve_secret",
            "curve_secret",
            FILE,
            "FILE",
            "The router's own secret CURVE key, for these (see `warmroute events keygen`).",
        ),
        Setting(
            "model_dir",
            "",
            TEXT,
            "[MODEL=]DIR",
            "Where the tokenizer and the chat template of a model are; without them its prompts are matched only "
            "approximately. May be repeated.  [default of MODEL: DIR as it is written]",
            multiple=True,
        ),
        Setting(
            "chat_template",
            "",
            TEXT,
            "[MODEL=]FILE",
            "A chat template in Jinja, where replicas use another one than that of --model-dir. May be repeated.  "
            "[default of MODEL: that of the only --model-dir]",
            multiple=True,
        ),
        SPECIAL_TOKENS_IN_TEXT,
    ],
    "HTTP": [
        Setting("host", "host", TEXT, "HOST", "The address to listen on."),
        Setting("port", "port", click.IntRange(0, 65535), "PORT", "The port to listen on; 0: any free one."),
        Setting("tls_cert", "tls_cert", FILE, "FILE", "Speak TLS, with this certificate and those that it needs."),
        Setting("tls_key", "tls_key", FILE, "FILE", "The certificate's private key."),
        Setting("max_body_bytes", "max_body_bytes", COUNT, "BYTES", "The largest request body."),
        Setting(
            "max_bodies_bytes",
            "max_bodies_bytes",
            click.IntRange(1, 2**40),
            "BYTES",
            "The memory that all request bodies in progress may take together; beyond it requests are refused with "
            "status 429. A quarter is kept for bodies of at most 1 MiB.",
        ),
        Setting("max_connections", "max_connections", COUNT, "N", "Clients that may be connected at once."),
        Setting(
            "cors_origin",
            "cors_origins",
            Origin(),
            "ORIGIN",
            "Let pages of this origin ask; *: those of any. May be repeated.",
            multiple=True,
        ),
        Setting(
            "drain_delay",
            "drain_delay_s",
            AT_LEAST_0,
            "SECONDS",
            "How long it still takes requests after SIGTERM, while /ready says no and each answer is the last of its "
            "connection: until load balancers have heard.",
        ),
        Setting(
            "drain_timeout",
            "drain_timeout_s",
            AT_LEAST_0,
            "SECONDS",
            "How long running requests may go on after that.",
        ),
        Setting(
            "die_with_parent",
            "die_with_parent",
            click.BOOL,
            "",
            "End when the process that started this one ends.",
            hidden=True,
        ),
    ],
    "Access": [
        Setting(
            "api_key",
            "",
            SECRET,
            "KEY",
            f"Demand a key of clients: this one. May be repeated. Better given as WARMROUTE_API_KEY: {NOT_IN_PS}",
            multiple=True,
            secret=True,
        ),
        Setting(
            "api_keys",
            "api_keys_file",
            FILE,
            "FILE",
            "A TOML file of keys with names, limits and groups. Changes count within a second.",
        ),
        Setting(
            "admin_key",
            "",
            SECRET,
            "KEY",
            "Demand this key of who changes replicas, or asks what was decided and why. Better given as "
            "WARMROUTE_ADMIN_KEY.  [default: only clients on this machine may]",
            secret=True,
        ),
        Setting(
            "client_path",
            "client_paths",
            ClientPath(),
            "PATH",
            "Let clients ask replicas for this path below /v1 as well, which is for administrators otherwise. May be "
            "repeated.",
            multiple=True,
        ),
    ],
    "Choosing": [
        Setting("policy", "policy", click.Choice(get_args(Policy)), "NAME", f"{', '.join(get_args(Policy))}."),
        Setting(
            "replica_limit",
            "replica_limit",
            click.IntRange(0, LARGEST),
            "N",
            "Requests that this router has running at one replica at most; 0: no limit.",
        ),
        Setting(
            "queue_size",
            "queue_size",
            click.IntRange(0, LARGEST),
            "N",
            "Requests that wait while no replica has room; more are refused with status 429.",
        ),
        Setting("queue_timeout", "queue_timeout_s", AT_LEAST_0, "SECONDS", "How long one may wait there."),
        Setting(
            "optimistic_ttl",
            "optimistic_ttl_s",
            AT_LEAST_0,
            "SECONDS",
            "How long a prompt counts as cached where it was sent, before events confirm it.",
        ),
        Setting(
            "message_cache_mb",
            "",
            FiniteRange(0, LARGEST),
            "MB",
            "Memory for the token ids of messages seen before, for each model.",
            RouterConfig().message_cache_bytes / MEGABYTE,
        ),
        Setting(
            "accuracy_objective",
            "accuracy_objective",
            FiniteRange(0, 1),
            "FRACTION",
            "How often the cached tokens that replicas report must be those predicted.",
        ),
    ],
    "Failure": [
        Setting(
            "resume",
            "resume",
            click.BOOL,
            "",
            "Go on with an answer on another replica when its own is lost.",
        ),
        Setting("connect_timeout", "connect_timeout_s", ABOVE_0, "SECONDS", "How long a replica may take to connect."),
        Setting(
            "first_token_timeout",
            "first_token_timeout_s",
            ABOVE_0,
            "SECONDS",
            "How long it may take to begin its answer, waiting and prefill included; "
            "of an answer that is not streamed: all of it.",
        ),
        Setting(
            "idle_timeout", "idle_timeout_s", ABOVE_0, "SECONDS", "How long it, or its client, may then be silent."
        ),
        Setting("health_interval", "health_interval_s", ABOVE_0, "SECONDS", "How often replicas are asked for health."),
        Setting("breaker_faults", "breaker_faults", COUNT, "N", "Faults in a row until a replica gets no requests."),
        Setting(
            "slow_start", "slow_start_s", AT_LEAST_0, "SECONDS", "How long one that comes back gets fewer than others."
        ),
    ],
    "What it tells": [
        Setting("decisions", "decisions", click.IntRange(0, 10**6), "N", "Decisions that are kept to be asked for."),
        Setting(
            "recent_prompts",
            "recent_prompts",
            click.IntRange(0, 20_000),
            "N",
            "Prompts of which it is kept how they begin, to say what they share; fewer, where they are long.",
        ),
        Setting(
            "show_prompts",
            "show_prompts",
            click.BOOL,
            "",
            "Keep and show the first words of what they share, too.  [default: unless clients have keys]",
        ),
        Setting("access_log", "access_log", TEXT, "FILE|-", "Write a line of JSON for each request; -: to stdout."),
        Setting(
            "request_log",
            "request_log",
            TEXT,
            "FILE|-",
            "Write a line of JSON for each generation request, with what its replica was chosen by; -: to stdout.",
        ),
        Setting("log_prompts", "log_prompts", click.BOOL, "", "Write the bodies of requests there, too."),
        Setting("otlp_endpoint", "otlp_endpoint", URL, "URL", "Send traces there, by OTLP over HTTP."),
        Setting(
            "log_level",
            "log_level",
            click.Choice(["debug", "info", "warning", "error"]),
            "LEVEL",
            "debug, info, warning or error.",
        ),
    ],
}

TABLE = Table("warmroute router", SETTINGS, RouterConfig())
