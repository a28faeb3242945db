"""The router's configuration. New fields need an option in `router.process.settings`; a test compares the two."""

from typing import Literal, TypeAlias

from msgspec import Struct

from router.members.discovery.collection import Cluster
from router.members.spec import ReplicaSpec
from router.placement.elsewhere import Mode
from router.tenants.keys import Key

Policy: TypeAlias = Literal["cost", "prefix", "least-loaded", "round-robin", "random", "session"]

MEGABYTE = 10**6


class Kubernetes(Struct, frozen=True):
    """A cluster, and the labels or the pool (exactly one of them) that select its replica pods."""

    cluster: Cluster
    pods: str | None = None  # those with these labels
    pool: str | None = None  # those of this InferencePool


class RouterConfig(Struct, frozen=True, kw_only=True):
    # Replicas
    replicas: tuple[ReplicaSpec, ...] = ()
    replicas_file: str | None = None
    registry: str | None = None
    kubernetes: Kubernetes | None = None
    replica_api_key: str | None = None  # sent to replicas that name no variable with a key of their own
    curve_server: str | None = None  # files, for replicas that name none: their public key,
    curve_secret: str | None = None  # and the router's own secret one
    expected_models: tuple[str, ...] = ()  # requests wait for their first replica
    model_rewrites_file: str | None = None
    model_dirs: dict[str, str] = {}  # model -> where its tokenizer and template are
    chat_templates: dict[str, str] = {}  # model -> a file, instead of the template that is there
    # HTTP
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    workers: int = 0  # processes; 0: see `router.process.server.workers_of`
    tls_cert: str | None = None
    tls_key: str | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 192 * 1024 * 1024  # the sum over all requests in progress
    max_connections: int = 8192
    cors_origins: tuple[str, ...] = ()
    drain_delay_s: float = 0.0
    drain_timeout_s: float = 60.0
    die_with_parent: bool = False
    # Access
    keys: tuple[Key, ...] = ()  # given by --api-key and --admin-key
    api_keys_file: str | None = None
    demand_key: bool = False  # an --admin-key alone guards only administration
    client_paths: tuple[str, ...] = ()  # below /v1, beside those of the table
    # Choosing
    policy: Policy = "cost"
    replica_limit: int = 512  # this router's requests at one replica, and its peers'; 0: no limit
    queue_size: int = 1024
    queue_timeout_s: float = 30.0
    hold_sessions: bool = True  # new ones wait while the caches do not hold those that have begun
    ask_engines: bool = True  # for the tokens of prompts that cannot be made here
    message_cache_bytes: int = 64 * MEGABYTE
    prefill_elsewhere: Mode = "auto"
    pass_kv_transfer_params: bool = False  # clients' own are passed on
    # Other routers
    peer_listen: str | None = None  # an endpoint
    peers: tuple[str, ...] = ()  # endpoints
    peer_keys: str | None = None  # a file: the secret CURVE key that all of them have
    # Gateways
    picker_listen: str | None = None  # HOST:PORT
    # Failure
    resume: bool = True
    connect_timeout_s: float = 2.0
    first_token_timeout_s: float = 300.0
    idle_timeout_s: float = 120.0
    health_interval_s: float = 2.0
    breaker_faults: int = 3
    slow_start_s: float = 10.0
    # Views and records
    decisions: int = 1000
    recent_prompts: int = 2000
    show_prompts: bool | None = None  # None: unless clients have keys
    access_log: str | None = None  # a file, or "-": stdout
    request_log: str | None = None  # a file, or "-": stdout
    log_prompts: bool = False
    usage_db: str | None = None  # a file; None: usage is kept in memory
    usage_days: int = 90
    metrics_keys: int = 20  # this many keys have counters of their own
    price_per_million_tokens: float | None = None  # a price of prompts; None: the dashboard shows no money
    otlp_endpoint: str | None = None
    log_level: str = "info"

    @property
    def shows_texts(self) -> bool:
        """Return whether the beginnings of prompts may be shown."""
        return not self.demand_key if self.show_prompts is None else self.show_prompts

    @property
    def curve_files(self) -> tuple[str, str] | None:
        if self.curve_server is None or self.curve_secret is None:
            return None
        return self.curve_server, self.curve_secret
