"""API keys: their rights and limits, and the salts that protect a tenant's cache from timing by others.

Only digests of keys are kept. A key is found by the SHA-256 of what the client sent: nobody can choose a digest that
begins like another one, so how long the search took tells nothing of the keys; what was found is still compared in
constant time.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise

import msgspec
from msgspec import Struct, field

from api.retention import TENANT_CHARACTERS
from router.placement.classes import FIRST_TOKEN_S, USUAL, WEIGHTS, ServiceClass
from router.placement.classes import NAMES as CLASS_NAMES

_DIGEST = re.compile(r"[0-9a-f]{64}")
CACHED_TOKEN_WEIGHT = 0.1  # about what providers charge for a cached token
LARGEST = 1e15
MAX_WEIGHT = 1000
MAX_FIRST_TOKEN_S = 3600
_ONE_OF_THEM = f"{', '.join(CLASS_NAMES[:-1])} or {CLASS_NAMES[-1]}"
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


class Limited(Struct, frozen=True, kw_only=True):
    requests_per_minute: float | None = None
    max_in_flight: int | None = None
    # Prompt tokens computed and tokens generated count as one each, cached ones by their weight:
    tokens_per_minute: float | None = None
    computed_tokens_per_minute: float | None = None
    cached_tokens_per_minute: float | None = None
    generated_tokens_per_minute: float | None = None
    requests_per_day: float | None = None
    tokens_per_day: float | None = None


LIMITS = Limited.__struct_fields__


class Key(Limited, frozen=True, kw_only=True):
    name: str  # the name in logs and metrics
    digest: bytes  # SHA-256 of the key
    salt: str | None = None  # None: it shares the cache with all others
    admin: bool = False
    cached_token_weight: float = CACHED_TOKEN_WEIGHT
    weight: float = 1.0  # its share of the replicas where requests wait, beside other keys' weights
    tenant_header: bytes | None = None  # names whoever the request is for, each of whom has a share of this weight
    classes: tuple[ServiceClass, ...] = ()  # its requests may have these, its own first; none: no key has classes

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request, derived from the client's own.

        The key's own part has a fixed length, so that no two pairs come to the same text.
        """
        if self.salt is None:
            return cache_salt
        return self.salt if cache_salt is None else f"{self.salt}.{cache_salt}"


def find(keys: Mapping[bytes, Key], given: bytes) -> Key | None:
    """The key that a client has sent, among these by their digests."""
    digest = hashlib.sha256(given).digest()
    key = keys.get(digest)
    return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def salt_of(secret: bytes, scope: str) -> str:
    """A salt that is the same on all routers with the same keys, before and after a restart."""
    mac = hmac.new(secret, f"warmroute cache salt\0{scope}".encode(), hashlib.sha256)
    return mac.hexdigest()[:TENANT_CHARACTERS]  # 128 bits


def keys_from_options(keys: Sequence[str], admin_key: str | None) -> list[Key]:
    """The keys given as options, each with a salt of its own and without limits."""
    made = {}
    for number, text in enumerate(dict.fromkeys(keys), 1):
        digest = digest_of(text)
        made[digest] = Key(name=f"key-{number}", digest=digest, salt=salt_of(digest, ""))
    if admin_key is not None:
        digest = digest_of(admin_key)
        made[digest] = Key(name="admin", digest=digest, salt=salt_of(digest, ""), admin=True)
    return list(made.values())


# ---- the file


def check_within(what: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise ValueError(f"{what} is {value}; write a number above 0, at most {most}")


class KeyTable(Limited, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`[keys.NAME]` in the file."""

    key: str | None = None
    key_sha256: str | None = None
    group: str | None = None  # the keys of a group share their cache
    salt: bool = True
    admin: bool = False
    cached_token_weight: float | None = None
    weight: float = 1.0
    tenant_header: str | None = None
    service_class: str | None = field(name="class", default=None)

    def digest(self, name: str) -> bytes:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError(f"keys.{name} needs either key or key_sha256; write one of them")
        if self.key is not None:
            if not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
                raise ValueError(f"the key of keys.{name} cannot be sent in a header; use visible ASCII characters")
            return digest_of(self.key)
        if not _DIGEST.fullmatch(digits := (self.key_sha256 or "").lower()):
            fix = "write the 64 digits of `printf KEY | sha256sum`"
            raise ValueError(f"key_sha256 of keys.{name} is not a SHA-256; {fix}")
        return bytes.fromhex(digits)

    def check(self, name: str) -> None:
        if not name or name.startswith("("):
            raise ValueError(f"{name!r} cannot be the name of a key; write one that begins with no parenthesis")
        for name_of_limit in LIMITS:
            limit, least = getattr(self, name_of_limit), 0 if name_of_limit == "requests_per_minute" else 1
            if limit is not None and not (least <= limit < LARGEST and limit):
                fix = "a number above 0" if not least else "1 or more"
                raise ValueError(f"{name_of_limit} of keys.{name} is {limit}; write {fix}, or leave it out")
        if (weight := self.cached_token_weight) is not None:
            if not 0 <= weight <= 1:
                raise ValueError(f"cached_token_weight of keys.{name} is {weight}; write a number from 0 to 1")
            if self.tokens_per_minute is None and self.tokens_per_day is None:
                raise ValueError(
                    f"keys.{name} has a cached_token_weight but no tokens_per_minute or tokens_per_day, which are all "
                    "that it changes; add one of them, or leave it out"
                )
        check_within(f"weight of keys.{name}", self.weight, MAX_WEIGHT)
        if self.tenant_header is not None and not _HEADER.fullmatch(self.tenant_header):
            raise ValueError(
                f"tenant_header of keys.{name} is {self.tenant_header!r}; write the name of a header, such as x-tenant"
            )
        if self.service_class is not None and self.service_class not in CLASS_NAMES:
            raise ValueError(f"class of keys.{name} is {self.service_class!r}; write {_ONE_OF_THEM}")
        if self.group is not None and not self.salt:
            raise ValueError(f"keys.{name} has the group {self.group!r} and salt = false; leave one of them out")


class ClassTable(Struct, forbid_unknown_fields=True):
    """`[classes.NAME]` in the file."""

    first_token_s: float | None = None
    weight: float | None = None

    def service(self, name: str) -> ServiceClass:
        if name not in CLASS_NAMES:
            raise ValueError(f"classes.{name} is no class; write {_ONE_OF_THEM}")
        first_token_s = FIRST_TOKEN_S[name] if self.first_token_s is None else self.first_token_s
        check_within(f"first_token_s of classes.{name}", first_token_s, MAX_FIRST_TOKEN_S)
        weight = WEIGHTS[name] if self.weight is None else self.weight
        check_within(f"weight of classes.{name}", weight, MAX_WEIGHT)
        return ServiceClass(name, CLASS_NAMES.index(name), first_token_s, weight)


class KeysFile(Struct, forbid_unknown_fields=True):
    keys: dict[str, KeyTable]
    salt_secret: str | None = None  # keeps salts as they are when keys change
    classes: dict[str, ClassTable] = {}

    def services(self) -> list[ServiceClass]:
        """The classes, the highest first; none unless the file speaks of some."""
        given = {name: table.service(name) for name, table in self.classes.items()}
        if not given and all(table.service_class is None for table in self.keys.values()):
            return []
        found = [given.get(name) or ClassTable().service(name) for name in CLASS_NAMES]
        for higher, lower in pairwise(found):
            if higher.first_token_s > lower.first_token_s:
                raise ValueError(
                    f"first_token_s of classes.{lower.name} is {lower.first_token_s:g}, less than the "
                    f"{higher.first_token_s:g} of classes.{higher.name}, a higher class; write more here, or less there"
                )
        return found


def parse_keys(path: str, text: str) -> list[Key]:
    """Parse a file of keys; the ValueError names the file and the key's table, and never quotes a key."""
    try:
        file = msgspec.convert(tomllib.loads(text), KeysFile)
        names: dict[bytes, str] = {}
        for name, table in file.keys.items():
            table.check(name)
            other = names.setdefault(table.digest(name), name)
            if other != name:
                raise ValueError(f"keys.{other} and keys.{name} are the same key; give each its own")
        secrets: dict[str, bytes] = {}  # each group has the digests of all its members' keys
        for digest, name in sorted(names.items()):
            if (group := file.keys[name].group) is not None:
                secrets[group] = secrets.get(group, b"") + digest
        services = file.services()
        return [_key(name, digest, file, secrets, services) for digest, name in names.items()]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_explained(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _key(
    name: str, digest: bytes, file: KeysFile, secrets: Mapping[str, bytes], services: Sequence[ServiceClass]
) -> Key:
    table = file.keys[name]
    own = file.salt_secret.encode() if file.salt_secret else None
    if not table.salt:
        salt = None
    elif table.group is not None:
        salt = salt_of(own or secrets[table.group], f"group {table.group}")
    else:
        salt = salt_of(own or digest, f"key {name}")
    weight = CACHED_TOKEN_WEIGHT if table.cached_token_weight is None else table.cached_token_weight
    classes = tuple(services[CLASS_NAMES.index(table.service_class or USUAL) :])
    return Key(
        name=name,
        digest=digest,
        salt=salt,
        admin=table.admin,
        cached_token_weight=weight,
        weight=table.weight * (classes[0].weight if classes else 1.0),
        classes=classes,
        tenant_header=None if table.tenant_header is None else table.tenant_header.lower().encode(),
        **{limit: getattr(table, limit) for limit in LIMITS},
    )


def _explained(error: msgspec.ValidationError) -> str:
    """Explain the error in the file's terms. msgspec names the path and the types, never the value."""
    said, _, path = str(error).partition(" - at ")
    where = path.strip("`").removeprefix("$").removeprefix(".").replace("[...]", ".NAME") or "the file"
    unknown = re.search(r"unknown field `(.*)`", said)
    if unknown is None:
        return f"{where}: {said[:1].lower()}{said[1:]}"
    table = ClassTable if where.startswith("classes") else KeyTable if where != "the file" else KeysFile
    known = sorted(table.__struct_encode_fields__, key=LIMITS.__contains__)
    near = get_close_matches(unknown[1], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys there are {', '.join(known)}"
    return f"{where}: {unknown[1]!r} is not known; {hint}"
