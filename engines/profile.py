"""The type of a profile: what is known of one engine, as data and the few pure functions that differ.

A field that is left out says that an engine is like any server of OpenAI's API, of which nothing more is known.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from engines.metrics import EngineMetrics
from engines.sources import Ask, Sources, untold

if TYPE_CHECKING:  # fleets need no tokenizers
    from api.prompts.prompts import Prompts
    from engines.prompts.asked import Asked, Question


class PromptBuilder(Protocol):
    """An engine's reading of requests to one model, which the router follows to know their tokens."""

    name: str

    def read(self, api: str, body: bytes, max_model_len: int | None = None) -> "Asked":
        """Read a request of this API; raise ApiError if its prompt cannot be known."""

    def tokenized(self, api: str, body: bytes) -> "Question | None":
        """The question for the tokens of a request; None: the engine has none for such requests."""


class ServerCommand(Struct, frozen=True, kw_only=True):
    """How a fleet starts the engine."""

    program: str  # a command, or a module of Python
    is_module: bool = False
    missing: str  # advice if it is not there
    start: tuple[str, ...]  # between the program or Python and the model
    ranks: str  # the option for the number of GPUs that share the model
    tokenizer: str
    switches: tuple[str, ...]
    events: Mapping[str, object] = {}  # more of --kv-events-config
    key_variable: str  # the variable of its environment that has its API key
    negates: bool = False  # a switch has --no-NAME
    # Options that a fleet sets itself, beside those that all engines have:
    fleet_keys: Mapping[str, str] = {}  # its options by the key of a model's plan
    rank_options: tuple[str, ...] = ()  # ranks are replicas
    fleet_options: tuple[str, ...] = ()


class EngineProfile(Struct, frozen=True, kw_only=True, eq=False):
    name: str  # the name in descriptions of replicas, files, metrics and logs
    owner: str | None = None  # `owned_by` of its models, by which it is recognized

    # ---- its answers and metrics
    describes_itself: bool = False  # /load tells its event sockets, too; it needs no other settings
    publishes_status: bool = False  # heartbeats with its load, beside its events
    health_path: str = "/health"
    answers_at_once: bool = False  # to health checks, whatever its engine does
    sources: Callable[[Ask], Awaitable[Sources]] = untold  # its event sockets
    metrics: EngineMetrics = EngineMetrics()
    is_scraped: bool = False  # its load, steps and caches are only in its metrics
    unused_blocks: int = 0  # blocks of a pool that hold no cache

    # ---- what its requests may have
    takes_envelope: bool = False  # tokens and the answer so far come before the body; it answers in frames
    takes_token_ids: bool = False  # a completion's prompt may be token ids: so it continues another replica's answer
    tells_ids: frozenset[str] = frozenset()  # APIs whose streams have token ids on request
    names_responses: bool = False  # requests say the id of a stored response
    separates_salts: bool = False  # it keeps the caches of different salts apart
    rank_header: str = ""  # steers a request to a data-parallel rank
    transfer_fields: tuple[str, ...] = ()  # fields that say from where it reads KV
    placing_fields: tuple[str, ...] = ()  # a rank, a key of its scheduler, a socket for the answer, an inner id
    nesting_fields: tuple[str, ...] = ()  # objects in which it looks for these, too
    plugin_fields: tuple[str, ...] = ()  # objects for its plugins, which may look at the whole output
    # A replica that computes a prompt for another one is asked for one token: the end of that request, after the
    # client's own fields. Its answer names the blocks, to be read once, unless neighbours read its cache.
    hand_over: bytes | None = None  # None: it hands no KV over
    shares_cache: bool = False
    hand_over_advice: str = ""  # advice if its answer names none
    prompts: Callable[["Prompts"], PromptBuilder] | None = None  # None: how it builds them is not known
    # The question for the tokens of a request of an API, at routes that render it or at `/tokenize`.
    question: Callable[[str, bytes, bool], "Question | None"] | None = None  # None: its answers are not relied on

    # ---- how its answers and routes differ
    hides_aborts: bool = False  # a message given up has no stop reason, and only a response's last token tells
    adapter_routes: str = "/v1"  # before /load_lora_adapter
    reset_path: str = "/reset_prefix_cache"

    # ---- what its users are told, and how it is started
    events_advice: str = "tell the router where its events are (events=tcp://HOST:PORT), if it sends any"
    batch_option: str = "--max-num-seqs"  # the most requests that it runs at once
    server: ServerCommand | None = None  # None: a fleet starts none
