"""The spec of a replica: its address, its engine, and all else that is known before it is asked.

A new field goes last, with a default; `parse_replica`, files and registries take it by its name.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from engines import PROFILES
from events.sockets.curve import load_curve_client
from events.source import Source
from router.placement.cost import Role


class Target(NamedTuple):
    """The address of a replica, parsed from its URL."""

    host: str
    port: int
    tls: bool
    path: str  # before every path of the API; empty or without a slash at its end

    @property
    def is_address(self) -> bool:
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"


def parse_target(url: str) -> Target:
    """Parse a replica's URL, with or without /v1; the ValueError quotes it and shows the expected form."""
    try:
        parts = urlsplit(url)
        port = parts.port
        usable = parts.scheme in ("http", "https") and parts.hostname and port != 0
    except ValueError:  # a bad port or address
        usable = False
    if not usable or parts.query or parts.fragment or parts.username or not parts.hostname:
        raise ValueError(f"{url!r} is no replica's URL; write http://HOST:PORT or https://HOST:PORT")
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))


AUTO = "auto"  # a value of `engine`: the replica tells it
OFF = "off"  # a value of `events`: none are followed, even if the replica has some
MAX_BLOCK_TOKENS = 65_536  # the most tokens of one block of a replica's cache
# Names of models are written to logs, terminals and metrics: what moves a cursor or breaks a line is refused here.
_UNPRINTABLE = (
    r"\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
)
ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512, pattern=rf"\A[^{_UNPRINTABLE}]*\Z")]
_MODEL_NAME = re.compile(rf"[^{_UNPRINTABLE}]*")
SOCKETS = ("events", "replay", "status", "snapshot")
WILDCARDS = frozenset({"*", "0.0.0.0", "[::]", "::"})

# Names are part of paths, where . and .. mean something else, and of metrics' labels.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.:@\[\]-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TCP = re.compile(r"tcp://(.+):(\d+)")
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


class BadSpec(ValueError):
    """An unusable description of a replica; the message names the value and the fix."""


class ReplicaSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica's description. A field that is None is unknown, and asked of the replica if it can tell."""

    name: str
    url: str
    engine: str = AUTO  # or the name of a profile
    model: str | None = None
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that it serves beside the model
    events: str | None = None  # an endpoint, or "off"
    replay: str | None = None
    status: str | None = None
    snapshot: str | None = None
    topic: str = ""
    curve_server: str | None = None  # the file of the replica's public key
    curve_secret: str | None = None  # the file of the router's own secret key
    block_size: int | None = None
    max_model_len: int | None = None
    resume: bool = False  # a foreign engine's answers may go on elsewhere
    api_key_env: str | None = None  # the variable that holds the key which the router sends
    draining: bool = False
    incarnation: int | str | None = None  # another one is another process, even at the same address
    role: Role | None = None  # None: it generates, and exchanges KV with no other replica

    @property
    def target(self) -> Target:
        return parse_target(self.url)

    def source(self, curve_files: tuple[str, str] | None = None) -> Source | None:
        """The source of its events; None if none is known. `curve_files` count if the spec names none."""
        if self.events is None or self.events == OFF:
            return None
        if self.curve_server is not None and self.curve_secret is not None:
            curve_files = (self.curve_server, self.curve_secret)
        try:
            curve = None if curve_files is None else load_curve_client(*curve_files)
        except ValueError as error:
            raise BadSpec(f"{self.name}: {error}") from error
        sockets = (self.events, self.replay, self.status, self.snapshot)
        return Source(self.name, *sockets, self.topic, self.model or "", curve)

    def api_key(self, environment: Mapping[str, str], default: str | None = None) -> str | None:
        if self.api_key_env is None:
            return default
        key = environment.get(self.api_key_env)
        if not key:
            why = f"api_key_env is {self.api_key_env!r}, which is not set; export it, or name another"
            raise BadSpec(f"{self.name}: {why}")
        return key

    def check(self) -> None:
        """Raise BadSpec for a spec that could never work."""

        def bad(what: str) -> BadSpec:
            return BadSpec(f"{self.name}: {what}")

        if not _NAME.fullmatch(self.name):
            fix = "take up to 128 letters, digits, and any of _ . : @ -, but not . or .. alone"
            raise BadSpec(f"the name {self.name!r} is not usable; {fix}")
        for model in (self.model or "", *self.adapters):
            if not _MODEL_NAME.fullmatch(model):
                raise bad(f"the model's name {model!r} has characters that cannot be printed; rename it")
        for field in ("block_size", "max_model_len"):
            if (number := getattr(self, field)) is not None and not 0 < number < 2**31:
                raise bad(f"{field} is {number}; write a whole number above 0, or leave it out")
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            raise bad("api_key_env is not a variable's name; write the name of the variable, not the key itself")
        if (self.curve_server is None) != (self.curve_secret is None):
            files = "the file of the replica's public key, and the file of your own secret key"
            raise bad(f"curve_server and curve_secret belong together: {files}")
        other = [field for field in SOCKETS[1:] if getattr(self, field) is not None]
        if other and (self.events is None or self.events == OFF):
            said = f"events is {self.events!r}" if self.events else "events is missing"
            raise bad(f"{other[0]} without events ({said}); name that endpoint too: events=tcp://HOST:PORT")
        for field in SOCKETS:
            endpoint = getattr(self, field)
            if endpoint is not None and (tcp := TCP.fullmatch(endpoint)) and tcp[1] in WILDCARDS:
                raise bad(f"{field} is {endpoint!r}, a bind address; give the publisher's host")
        if self.events is not None and self.events != OFF:
            try:
                Source(self.name, self.events, self.replay, self.status, self.snapshot).check()
            except ValueError as error:
                raise BadSpec(str(error)) from error


Desired: TypeAlias = dict[str, ReplicaSpec]  # keyed by name

_FIELDS = {field.name: field.type for field in msgspec.structs.fields(ReplicaSpec)}
# Fields that only a registry sets, and the list that repeated `adapter=` keys stand for on the command line.
_NOT_TYPED = frozenset({"draining", "incarnation", "adapters"})
_TYPED = {**{name: kind for name, kind in _FIELDS.items() if name not in _NOT_TYPED}, "adapter": str}


def parse_replica(text: str) -> ReplicaSpec:
    """Parse `http://HOST:PORT`, or `key=value` pairs between commas; a leading URL needs no key."""
    if text.startswith(("http://", "https://")):
        text = f"url={text}"
    fields: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not equals:
            raise BadSpec(
                f"{pair!r} in {text!r} is not key=value; write http://HOST:PORT, or url=http://HOST:PORT,key=value"
            )
        _known(key, _TYPED, text)
        if not value:
            raise BadSpec(f"{key} in {text!r} is empty; give it a value, or leave it out")
        if key == "adapter":
            fields.setdefault("adapters", []).append(value)
        elif key in fields:
            raise BadSpec(f"{key} in {text!r} appears twice; give it once")
        else:
            fields[key] = value
    return spec_of(fields, strict=False)


def spec_of(fields: Mapping[str, Any], *, strict: bool = True) -> ReplicaSpec:
    """A checked spec from fields by name, as they stand in a file; not `strict`: numbers may be text."""
    for key in fields:
        _known(key, _FIELDS, str(fields.get("url", "the replica")))
    url, target = fields.get("url"), None
    if not isinstance(url, str):
        raise BadSpec(f"{'the url is missing' if url is None else f'the url is {url!r}'}; write url=http://HOST:PORT")
    with suppress(ValueError):
        target = parse_target(url)
        if not _HOST.fullmatch(target.host):
            target = None
    if target is None:
        raise BadSpec(f"url is {url!r}; write http://HOST:PORT or https://HOST:PORT")
    named = {"name": target.authority, **fields, "url": target.url}
    engine = named.get("engine", AUTO)
    if engine not in (known := engines()):
        raise BadSpec(f"{url}: engine is {engine!r}; write {', '.join(known[:-1])} or {known[-1]}")
    try:
        spec = msgspec.convert(named, ReplicaSpec, strict=strict)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at ")  # `Expected ..., got ... - at `$.key``
        key = path.strip("`").removeprefix("$.").partition("[")[0]
        what = "write prefill, decode or both" if key == "role" else f"{said[:1].lower()}{said[1:]}"
        raise BadSpec(f"{url}: {key} is {named.get(key)!r}{'; ' if key == 'role' else ': '}{what}") from error
    spec.check()
    return spec


def engines() -> tuple[str, ...]:
    return AUTO, *PROFILES


def by_name(specs: Iterable[ReplicaSpec]) -> Desired:
    """Specs by name; raise BadSpec if two have the same name."""
    named: Desired = {}
    for spec in specs:
        if spec.name in named:
            raise BadSpec(
                f"two replicas are named {spec.name!r}: {named[spec.name].url} and {spec.url}; give one another name"
            )
        named[spec.name] = spec
    return named


# ---- a file of replicas: one `[[replicas]]` table each

_TABLE = re.compile(r"^[ \t]*\[\[[ \t]*replicas[ \t]*\]\]", re.MULTILINE)


def parse_replicas(path: str, text: str) -> Desired:
    """Parse the whole file; raise ValueError with file and line: half a list would drop existing replicas."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    for key in content:
        if key != "replicas":
            raise ValueError(f"{path}: {key!r} is not known here; write one [[replicas]] for each replica")
    tables = content.get("replicas", [])
    if not isinstance(tables, list):
        raise ValueError(f"{path}: replicas is not a list; write [[replicas]]")
    desired: Desired = {}
    starts = [found.start() for found in _TABLE.finditer(text)]
    for number, table in enumerate(tables):
        place = f"{path}, replica {number + 1}"
        if number < len(starts):  # else it is one of a list of inline tables
            place = f"{path}, line {text.count(chr(10), 0, starts[number]) + 1}"
        if not isinstance(table, dict):
            raise ValueError(
                f"{place}: {table!r} is not a table; write [[replicas]], and below it url = 'http://HOST:PORT'"
            )
        try:
            spec = spec_of(table)
        except BadSpec as error:
            raise ValueError(f"{place}: {error}") from error
        if spec.name in desired:
            raise ValueError(f"{place}: another replica is named {spec.name!r}; choose another name")
        desired[spec.name] = spec
    return desired


def _known(key: str, names: Mapping[str, object], where: str) -> None:
    if key in names:
        return
    if key in ("api_key", "key"):
        raise BadSpec(f"{key} in a replica's description would be readable by other users; write api_key_env=VARIABLE")
    near = get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
    raise BadSpec(f"{key!r} in {where!r} is not a key of a replica; {hint}")
