"""A replica as it ships: its server and its engine, whole, on the world's loop. Its runner only pretends to compute.

What its two processes take from outside is the world's: the pair of sockets between them, the signals, and the clock,
which is ahead of the loop's while a step is computed: what comes of a turn is sent at the turn's end.
"""

import asyncio
import json
import math
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from functools import partial
from hashlib import blake2b
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import zmq

from events.native import Load
from events.publisher import PublisherConfig
from replica import messages
from replica.config import EngineConfig, ReplicaConfig, SimulatedConfig
from replica.engine.engine import Engine
from replica.http.engine_client import EngineClient
from replica.process import REPORT_INTERVAL_S, Loop
from replica.runners.request import Request
from replica.runners.runner import SampledToken
from replica.runners.simulated import SimulatedRunner
from replica.server import serve_on
from tests.router.scripted import CHAT, COMPLETIONS, MODEL, QUEUE_FULL
from tests.world.network import HERE, Bound, End, Network
from tests.world.publisher import Publisher
from tests.world.replica import BLOCK_TOKENS, PORT, PREFILL_TOKENS_PER_S, PROMPTS, TOOL, ScriptedReplica, letter

NUMBERS = count(1_000_000)  # of descriptors, of which the system has none
MAX_MODEL_LEN = 4096


class Asked(NamedTuple):
    """The request that the server works on."""

    id: str
    end: End
    sent_s: float


ASKED: ContextVar[Asked] = ContextVar("asked")


class Working:
    """Stands for a scripted replica's `Answering`: it has what the engine was given, and what came of it."""

    def __init__(self, replica: "EngineReplica", submit: messages.Submit) -> None:
        self.id, self._end, self.sent_s = ASKED.get()
        self.replica, self.salt = replica, submit.cache_salt
        self.prompt_tokens = len(submit.prompt) // 4
        self.cached: int | None = None  # None: it has not begun
        self.came_s, self.lost_s = replica.loop.time(), math.inf

    @property
    def is_lost(self) -> bool:
        return self._end.is_lost


class Runner(SimulatedRunner):
    """Draws what scripted replicas say: a token by all that stands before it, as models do."""

    def draw(self, request: Request, position: int) -> SampledToken:
        before = request.chain.tokens[: request.prompt_tokens + position].tobytes()
        return SampledToken(letter(blake2b(before, digest_size=1)))


class EngineReplica(ScriptedReplica):
    def __init__(self, network: Network, name: str, chance: random.Random, say: Callable[[str, str], None]) -> None:
        super().__init__(network, name, chance, say)
        self.cache_blocks = chance.choice((200, 2_000))  # the longest prompts fit
        self.process: EngineProcess
        self._used: set[End] = set()  # that have brought a request
        self._signals: Any
        self._config = EngineConfig(
            model=MODEL,
            engine="simulated",
            block_size=BLOCK_TOKENS,
            num_blocks=self.cache_blocks,
            max_num_seqs=self.most_running,
            max_waiting=max(1, self.most_waiting),
            max_model_len=min(MAX_MODEL_LEN, self.cache_blocks * BLOCK_TOKENS),
            simulated=SimulatedConfig(prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_tokens_per_s=1 / self.decode_s),
        )

    @property
    def blocks(self) -> list[int]:
        names = self.process.engine.pool._names
        return [key for key in set(names.keys) if names.find(key) >= 0]

    def start(self) -> None:
        self.incarnation += 1
        self.draining = False
        self._signals = SimpleNamespace(end=asyncio.Event(), at_once=asyncio.Event())
        context = copy_context()
        context.run(HERE.set, self.host)
        self.publisher = publisher = _Publisher(self.network, self.host, self.incarnation, MODEL, self.happens)
        self.process = publisher.process = EngineProcess(self, self._config, publisher, context)
        living = self.loop.create_task(self._live(self.process), context=context)
        living.add_done_callback(lambda _: self.host.kill())  # with its server all of it ends
        self.say(self.name, f"starts, process {self.incarnation}")

    async def _live(self, process: "EngineProcess") -> None:
        folder = SimpleNamespace(close=lambda: None)
        client = EngineClient(process, process.other_end, folder)  # type: ignore[arg-type]
        process.loop.greet()
        process.turn()
        bound: Any = Bound((self.host.address, PORT), around=self._around)
        config = ReplicaConfig(engine=self._config)
        await serve_on(bound, config, PROMPTS, signals=self._signals, engine=client)
        self.say(self.name, "has drained, and ends")

    def drain(self) -> None:
        self.forgets()
        self.say(self.name, f"drains, with {len(self.running)} running")
        self.draining = True
        self._signals.end.set()

    def take_again(self) -> None:
        """Nothing takes a signal back."""
        self.kill()
        self.start()

    def kill(self) -> None:
        self.say(self.name, f"is killed, with {len(self.running)} running")
        self.host.kill()
        self.process.is_over = True
        for working in list(self.running):
            self.lose(working)

    def go_on(self) -> None:
        self.hangs = False
        self.process.heard()

    def lose(self, working: Any) -> None:
        working.lost_s = self.loop.time()
        del self.running[working]

    def check_at_rest(self) -> None:
        engine = self.process.engine
        engine.check()
        assert not engine.busy, f"{self.name} computes"
        assert engine.pool.free == self.cache_blocks, f"{engine.pool.free} of {self.cache_blocks} blocks are free"

    # ---- what is seen of its server

    def _around(self, factory: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            protocol = factory()
            protocol._app = partial(self._serve, protocol._app)
            return protocol

        return made

    async def _serve(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request by the shipped app, and note what is refused."""
        asked_id = dict(scope["headers"]).get(b"x-request-id", b"").decode()
        end = next(end for end in self.host.ends if end.addresses[1] == scope["client"])
        path, status, router = scope["path"], 0, end.peer
        sent_s = router.written_s if end in self._used else router.asked_s
        self._used.add(end)

        async def tell(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            if status >= 400 and asked_id and (body := message.get("body")):
                code = json.loads(body).get("error", {}).get("code")
                self.refusals.setdefault(asked_id, set()).add(f"{status} {code}")
                if code == "draining" and path in (CHAT, COMPLETIONS):
                    self.refuses(asked_id, router, sent_s)
            await send(message)

        if path in (CHAT, COMPLETIONS, TOOL):
            self.happens("request")
            crowd = (lambda: (429, QUEUE_FULL)) if self.is_crowded and path != TOOL else None
            answers = self.answers or crowd
            if answers is not None and not self.draining:
                status, body = answers()
                length = (b"content-length", b"%d" % len(body))
                await tell({"type": "http.response.start", "status": status, "headers": [length]})
                await tell({"type": "http.response.body", "body": body})
                return
        ASKED.set(Asked(asked_id, end, sent_s))
        await app(scope, receive, tell)
        if path == self.health_path:
            if status == 200:
                self.is_well(router.host, sent_s)
            self.happens("health check")


class EngineProcess:
    """Stands for the engine's process, its clock, and its end of the pair; turns are those of `replica.process`."""

    pid, returncode = 0, None

    def __init__(self, replica: EngineReplica, config: EngineConfig, publisher: "_Publisher", context: Context) -> None:
        self.other_end = ServerEnd(self)
        self.received: deque[bytes] = deque()
        self._replica, self._world = replica, replica.loop
        self._until_s = 0.0  # the engine computes
        self._is_computing = self.is_over = False
        self._context = context
        self._next: asyncio.Handle | None = None  # turn
        self._comes: list[Callable[[], object]] = []  # of this turn
        self._exited: asyncio.Future[int] = self._world.create_future()
        self._working: dict[int, Working] = {}
        clock: Any = self
        self.engine = Engine(config, Runner(config.simulated, clock, config.vocabulary), clock)
        self.loop = Loop(self.engine, publisher, clock, 0)  # type: ignore[arg-type]

    # ---- a process

    async def wait(self) -> int:
        return await asyncio.shield(self._exited)

    # ---- a clock

    def now_s(self) -> float:
        return max(self._world.time(), self._until_s)

    def sleep(self, seconds: float) -> None:
        self._until_s = self.now_s() + seconds

    # ---- turns

    def later(self, do: Callable[[], object]) -> None:
        self._comes.append(do)

    def send(self, payload: bytes) -> None:
        self.later(lambda: self._say(payload))

    def heard(self) -> None:
        if not self._is_computing:
            self.turn()

    def turn(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._replica.hangs or self.is_over:
            return
        while self.received and not self.loop.stopped:
            self.loop.obey(self.received.popleft())
        if self.loop.stopped:
            self.is_over = True
            self._exited.set_result(0)
            return
        self.loop.turn()
        self._is_computing = True
        self._next = self._world.call_at(self.now_s(), self._end_turn, context=self._context)

    def _end_turn(self) -> None:
        self._is_computing, comes = False, self._comes
        self._comes = []
        for do in comes:
            do()
        if self.received or self.engine.busy:
            self.turn()
        else:
            self._next = self._world.call_later(REPORT_INTERVAL_S, self.turn, context=self._context)

    # ---- what is seen of the pair

    def hear(self, payload: bytes) -> None:
        message, replica = messages.decode_to_engine(payload), self._replica
        if isinstance(message, messages.SubmitAll):
            for submit in message.submits:
                if submit.output:
                    replica.happens("continuation")
                working: Any = Working(replica, submit)
                self._working[submit.id] = replica.running[working] = working
                replica.answerings.append(working)
        elif isinstance(message, messages.Cancel):
            for number in message.ids:
                if (lost := self._working.pop(number, None)) is not None:  # else its last word is on the way
                    replica.lose(lost)
        self.received.append(payload)
        self._world.call_soon(self.heard)

    def _say(self, payload: bytes) -> None:
        message, replica = messages.decode_from_engine(payload), self._replica
        if isinstance(message, messages.Outputs):
            for output in message.outputs:
                if (working := self._working.get(output.id)) is None:
                    continue  # it is cancelled
                if working.cached is None:
                    working.cached = output.cached_tokens
                    replica.happens("first token")
                if output.finish_reason is not None:
                    del replica.running[self._working.pop(output.id)]  # type: ignore[arg-type]
        elif isinstance(message, messages.Refused) and message.id in self._working:
            del replica.running[self._working.pop(message.id)]  # type: ignore[arg-type]
        self.other_end.take(payload)


class ServerEnd:
    """Stands for the server's end of the pair, a socket of libzmq."""

    def __init__(self, process: EngineProcess) -> None:
        self.closed = False
        self.context = SimpleNamespace(term=lambda: None)
        self._process = process
        self._number = next(NUMBERS)
        self._received: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._number

    def send(self, payload: bytes, flags: int = 0) -> None:
        del flags
        self._process.hear(payload)

    def recv(self, flags: int = 0) -> bytes:
        del flags
        if not self._received:
            raise zmq.Again
        return self._received.popleft()

    def take(self, payload: bytes) -> None:
        self._received.append(payload)
        if not self.closed:
            self._process._world.is_readable(self._number)

    def close(self) -> None:
        self.closed = True


class _Publisher(Publisher):
    """Publishes at the end of a turn, as the engine's process does."""

    process: EngineProcess
    config = PublisherConfig(topic="kv", model=MODEL)

    def publish(self, events: Any) -> None:
        self.published_s = self._loop.time()  # the engine has them already
        if events:
            self.process.later(partial(super().publish, events))

    def report(self, load: Load) -> None:
        self.process.later(partial(super().report, load))
