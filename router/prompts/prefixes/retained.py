"""Prefixes that replicas give up last: what this router has asked of them, and for how long. Pure; time is an argument.

It is an estimate: a replica may have had no room for it, and a use by way of another router renews its time unseen.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from api.retention import Retain

MAX_PREFIXES = 1024  # the one that was used longest ago is forgotten for one more
MAX_OF_OPERATORS = 256  # the most of these; one more is refused
MAX_BYTES = 16 * 2**20  # the token ids of those together, which are kept to end them


class RetainedPrefix(Struct, eq=False):
    key: int  # the key of its last block
    model: str
    block_size: int
    tokens: int
    ttl_s: float
    until_s: dict[str, float]  # the end at each replica
    packed: bytes = b""  # an operator's token ids; empty: a client asked for it
    salt: str | None = None

    @property
    def id(self) -> str:
        return f"{self.key:016x}"

    @property
    def is_operators(self) -> bool:
        return bool(self.packed)

    def left_s(self, now_s: float) -> float:
        return max(self.until_s.values(), default=now_s) - now_s


class Full(Exception):
    """Operators retain as much as they may."""


class RetainedPrefixes:
    def __init__(self) -> None:
        self._prefixes: OrderedDict[int, RetainedPrefix] = OrderedDict()  # keyed by the last key, last used last

    def __len__(self) -> int:
        return len(self._prefixes)

    def asked(
        self, replica: str, model: str, block_size: int, keys: Sequence[int], retain: Iterable[Retain], now_s: float
    ) -> None:
        """Note that a replica has answered a prompt with these keys, which uses what is retained of it."""
        for key in self._prefixes.keys() & keys if self._prefixes else ():
            prefix = self._prefixes[key]
            if prefix.until_s.get(replica, 0.0) > now_s:
                prefix.until_s[replica] = now_s + prefix.ttl_s
                self._prefixes.move_to_end(key)
        for beginning in retain:
            blocks = min(beginning.tokens // block_size, len(keys))
            if blocks:
                key, tokens = keys[blocks - 1], blocks * block_size
                made = RetainedPrefix(key, model, block_size, tokens, beginning.ttl_s, {})
                found = self._prefixes.setdefault(key, made)
                found.ttl_s = max(found.ttl_s, beginning.ttl_s)
                found.until_s[replica] = now_s + found.ttl_s
                self._prefixes.move_to_end(key)
        self._forget_more()

    def _forget_more(self) -> None:
        """Forget clients' that were used longest ago: operators may have fewer than all."""
        while len(self._prefixes) > MAX_PREFIXES:
            del self._prefixes[next(key for key, prefix in self._prefixes.items() if not prefix.is_operators)]

    def check_room(self, key: int, packed: bytes, now_s: float) -> None:
        """Raise Full if an operator may not retain this as well."""
        self.expire(now_s)
        others = [prefix for prefix in self._prefixes.values() if prefix.is_operators and prefix.key != key]
        if len(others) >= MAX_OF_OPERATORS:
            raise Full(f"{len(others)} prefixes are retained by operators, and no more may be; end one")
        size = sum(len(prefix.packed) for prefix in others) + len(packed)
        if size > MAX_BYTES:
            raise Full(f"with this one operators retain {size // 4:,} tokens; at most {MAX_BYTES // 4:,}: end one")

    def retain(self, prefix: RetainedPrefix) -> None:
        """Remember an operator's, in place of what is known of the same one."""
        self._prefixes[prefix.key] = prefix
        self._prefixes.move_to_end(prefix.key)
        self._forget_more()

    def end(self, key: int) -> None:
        self._prefixes.pop(key, None)

    def find(self, id: str) -> RetainedPrefix | None:
        return next((prefix for prefix in self._prefixes.values() if prefix.id == id), None)

    def expire(self, now_s: float) -> None:
        """Forget what is no longer retained anywhere."""
        for prefix in list(self._prefixes.values()):
            prefix.until_s = {name: until_s for name, until_s in prefix.until_s.items() if until_s > now_s}
            if not prefix.until_s:
                del self._prefixes[prefix.key]

    def until_s(self, now_s: float) -> dict[int, float]:
        """When each ends, by its last key."""
        return {prefix.key: now_s + prefix.left_s(now_s) for prefix in self.all(now_s)}

    def all(self, now_s: float) -> list[RetainedPrefix]:
        """All that are retained now, the last used first."""
        self.expire(now_s)
        return list(self._prefixes.values())[::-1]

    def check(self) -> None:
        assert len(self._prefixes) <= MAX_PREFIXES
        operators = [prefix for prefix in self._prefixes.values() if prefix.is_operators]
        assert len(operators) <= MAX_OF_OPERATORS
        assert sum(len(prefix.packed) for prefix in operators) <= MAX_BYTES
        assert all(prefix.key == key for key, prefix in self._prefixes.items())
