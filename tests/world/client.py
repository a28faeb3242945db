"""Clients of a world: each asks one thing after the other, and notes how every answer ended."""

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count

from msgspec import Struct

from tests.router.scripted import CHAT, DONE, MODEL, Client, chat
from tests.world.loop import WorldLoop
from tests.world.replica import TOOL

WORDS = ("cache", "block", "route", "warm", "prefix", "token", "queue", "drain", "probe", "stream")
CONNECTS_S = 0.1  # before it asks, where clients ask at the same moments
PATIENCE_S = 60.0  # without a byte: longer than every limit of the router together
LEFT = "left"
LIMITED = "refused with 429 rate_limit_exceeded"
PAUSES = (1, 0.05), (10, 1.0), (40, 4.0)
PADDINGS = 20_000, 100_000, 240_000  # the router reads longer bodies in a process of its own
_OWN = re.compile(rb'"id":"[^"]*"|"created":[0-9]+|,"(?:stop_reason|matched_stop)":null|,"usage":\{.*\}(?=\}$)')


class Asked(Struct, eq=False):
    """A request, and all that was heard of it."""

    id: str
    key: str | None
    asked_s: float
    text: str
    max_tokens: int
    streams: bool = True
    leaves_after: int | None = None  # this many pieces of the answer, as a client that has enough; None: it stays
    is_wrong: bool = False  # its body is no JSON
    is_tool: bool = False  # its effects are unknown
    padding: int = 0  # bytes of its body that nobody reads
    pauses: tuple[int, float] | None = None  # after this many pieces it reads nothing for this long, again and again
    longest_wait_s: float = 0.0  # from one byte to the next
    status: int = 0
    replica: str = ""  # that began the answer
    body: bytes = b""
    ends: list[str] = []  # there should be one
    ended_s: float = math.inf

    @property
    def answer(self) -> bytes:
        """The body without what is the request's own."""
        return without_own(self.body)


def without_own(answer: bytes) -> bytes:
    return _OWN.sub(b"", answer)


class _Leaves(Exception):
    """The client has enough."""


class Asking:
    """One client. Those of a world share `beginnings` of their prompts.

    `together_s`: they ask at the same moments. `lull`: in which they ask nothing.
    """

    def __init__(
        self,
        name: str,
        chance: random.Random,
        router: tuple[str, int],
        say: Callable[[str, str], None],
        asked: dict[str, Asked],
        left_out: Collection[str],
        key: str | None,
        beginnings: Sequence[str],
        together_s: float,
        lull: tuple[float, float],
    ) -> None:
        self.name = name
        self._asked, self._left_out = asked, left_out
        self._chance = chance
        self._router = router
        self._say = say
        self._key = key
        self._beginnings = beginnings
        self._together_s = together_s
        self._lull = lull
        self._tools = chance.choice((0.0, 0.1, 0.1, 0.5))  # a share of what it asks
        self._slow = chance.choice((0.0, 0.0, 0.3))

    async def run(self, until_s: float) -> None:
        loop, chance = asyncio.get_running_loop(), self._chance
        for number in count(1):
            at_s = loop.time() + chance.expovariate(1.0)
            if self._together_s:
                at_s = math.ceil(at_s / self._together_s) * self._together_s
            if self._lull[0] <= at_s < self._lull[1]:
                at_s += self._lull[1] - self._lull[0]
            if at_s >= until_s:
                return
            await asyncio.sleep(at_s - (CONNECTS_S if self._together_s else 0.0) - loop.time())
            words = chance.choices(WORDS, k=chance.choice((3, 40, 200)))
            text = chance.choice(self._beginnings) + " ".join(words)
            most_tokens = chance.choice((1, 8, 30, 100))
            asked = Asked(f"{self.name}-{number}", self._key, max(at_s, loop.time()), text, most_tokens)
            asked.streams = chance.random() < 0.7
            asked.leaves_after = chance.choice((0, 1, 5)) if chance.random() < 0.1 else None
            asked.is_wrong = chance.random() < 0.05
            asked.is_tool = chance.random() < self._tools
            asked.streams &= not asked.is_tool
            asked.padding = chance.choice(PADDINGS) if chance.random() < 0.03 else 0
            if chance.random() < self._slow:
                asked.max_tokens, asked.pauses = chance.choice((100, 400)), chance.choice(PAUSES)
            if asked.id not in self._left_out:
                self._asked[asked.id] = asked
                await self.ask(asked)

    async def ask(self, asked: Asked) -> None:
        """Ask it, hear the answer to its end, and note how it ended."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WorldLoop)
        began_s = heard_s = asked.asked_s
        try:
            limit = 2**16 if asked.pauses is None else 1024  # of what is read before it is wanted
            reader, writer = await asyncio.open_connection(*self._router, limit=limit)
        except ConnectionRefusedError:
            asked.ended_s = loop.time()
            asked.ends.append("its connection ended (ConnectionRefusedError)")
            return
        client, pieces = Client(reader, writer), list[bytes]()
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                fields = {"stream": asked.streams, "max_tokens": asked.max_tokens, "temperature": 0}
                path, body = CHAT, chat(asked.text, **fields)
                if asked.is_tool:
                    path, body = TOOL, {"model": MODEL, "text": asked.text}
                body |= {"padding": "x" * asked.padding} if asked.padding else {}
                key = {} if asked.key is None else {"authorization": f"Bearer {asked.key}"}
                await asyncio.sleep(asked.asked_s - loop.time())
                said = f"asks {asked.id}: {len(asked.text)} characters, for {asked.max_tokens} tokens"
                self._say(self.name, said)
                client.send("POST", path, b"{" if asked.is_wrong else body, x_request_id=asked.id, **key)
                if asked.leaves_after == 0:
                    await asyncio.sleep(self._chance.choice((0.0, 0.001, 0.02, 1.0)))
                    raise _Leaves
                asked.status, headers = await client.head()
                asked.replica = headers.get("x-warmroute-replica", "")
                if "content-length" in headers:
                    pieces.append(await reader.readexactly(int(headers["content-length"])))
                else:
                    while piece := await client.chunk():
                        pieces.append(piece)
                        asked.longest_wait_s = max(asked.longest_wait_s, loop.time() - heard_s)
                        heard_s = loop.time()
                        patience.reschedule(heard_s + PATIENCE_S)
                        if len(pieces) == asked.leaves_after:
                            raise _Leaves
                        if asked.pauses is not None and len(pieces) % asked.pauses[0] == 0:
                            await asyncio.sleep(asked.pauses[1])
                            heard_s = loop.time()
        except _Leaves:
            asked.ends.append(LEFT)
        except TimeoutError:
            asked.ends.append("nothing came any more")
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            asked.ends.append(f"its connection ended ({type(error).__name__})")
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()
        asked.longest_wait_s = max(asked.longest_wait_s, loop.time() - heard_s)
        asked.body = b"".join(pieces)
        asked.ended_s = loop.time()
        if not asked.ends:
            asked.ends.append(self._end(asked))
        self._say(self.name, f"{asked.id}: {asked.ends[-1]} after {loop.time() - began_s:.3f} s")

    @staticmethod
    def _end(asked: Asked) -> str:
        if asked.status != 200:
            return f"refused with {asked.status} {json.loads(asked.body)['error']['code']}"
        if b'data: {"error"' in asked.body:
            return "broken off"
        return "whole" if not asked.streams or asked.body.endswith(DONE) else "without an end"
