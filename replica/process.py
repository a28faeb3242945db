"""The engine's own process: `python -m replica.process SOCKET PARENT_PID`, with the EngineConfig as msgpack on stdin.

It shares nothing with the HTTP process but one pair of sockets, so HTTP never holds up a step. It ends when it is told
to, or with its parent. SIGUSR1 has it verify every invariant between two steps, and log what it found.
"""

import errno
import gc
import logging
import os
import signal
import socket as network
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq

from api.process.lifeline import die_with_parent, orphaned
from events.publisher import Publisher, PublisherConfig
from events.sockets.curve import load_curve
from replica import messages
from replica.config import EngineConfig
from replica.disk.file import DiskFile, open_disk_file
from replica.engine.engine import Engine
from replica.grammar.compilations import Compilations
from replica.model.sizing import GIGABYTE
from replica.neighbours.connection import NeighbourConfig
from replica.neighbours.holds import Holds
from replica.neighbours.reader import Reader
from replica.neighbours.source import Source
from replica.neighbours.warm import warm
from replica.runners.clock import Clock, WallClock
from replica.runners.runner import Runner
from replica.settings.sizes import free_bytes
from replica.tiers.mover import HostMemory, Mover

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
REPORT_INTERVAL_S = 0.25
TOO_LARGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BESIDE_POLL_S = 0.001  # the pause when nothing is to compute, but other threads have constraints or blocks under way


def main(arguments: Sequence[str]) -> int:
    endpoint, parent_pid = arguments[0], int(arguments[1])
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when to end: it drains first
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    with ExitStack() as stack:
        socket: zmq.Socket[bytes] = stack.enter_context(zmq.Context.instance().socket(zmq.PAIR))
        socket.set_hwm(0)  # the number of accepted requests bounds what can wait in it
        socket.linger = 1000
        socket.connect(endpoint)
        socket.send(messages.encode(messages.Loading()))
        try:
            clock = WallClock()
            config = within_cache(config)
            runner = make_runner(config, clock)
            if not config.num_blocks:
                config = within_cache(msgspec.structs.replace(config, num_blocks=runner.num_blocks))
            reader = make_reader(config, runner)
            mover = make_mover(config, runner, reader)
            if reader is not None:
                stack.callback(reader.close)
            if mover is not None:
                stack.callback(mover.close)
            engine = Engine(config, runner, clock, mover)
            neighbours = None
            if reader is not None:
                if config.warm_from:  # nobody can read here meanwhile, so replicas that start together do not wait
                    warm(engine.pool, reader, config.warm_from.split(","), engine.digests or {})
                assert mover is not None and config.kv_read is not None, "there is KV memory"
                neighbours = Source(reader.config, config.kv_read, Holds(engine.pool), mover)
                for end in neighbours.holds.close, neighbours.close, reader.stop:  # in the other order
                    stack.callback(end)
                log.info("neighbours may read blocks at %s", neighbours.endpoint)
            publisher = None if config.events is None else stack.enter_context(Publisher(publisher_config(config)))
        except (ValueError, OverflowError, MemoryError, OSError, zmq.ZMQError) as error:  # a wrong setting
            print(f"Error: the engine cannot start: {error or 'out of memory'}", file=sys.stderr)
            return 1
        loop = Loop(engine, publisher, socket, parent_pid, neighbours, reader)
        gc.collect()
        gc.freeze()  # all objects of the start stay, and need not be looked through in the middle of a step
        signal.signal(signal.SIGUSR1, loop.ask_for_check)
        loop.run()
    return 0


def within_cache(config: EngineConfig) -> EngineConfig:
    """Limit a request's length to the cache, even if the model could take more."""
    if not config.num_blocks:
        return config  # nobody knows yet
    capacity = config.num_blocks * config.block_size
    if capacity < 2:
        raise ValueError(f"the cache holds {capacity} tokens, and no answer fits beside a prompt; raise --num-blocks")
    if config.max_model_len <= capacity:
        return config
    log.warning("max_model_len %d is lowered to %d, the size of the cache", config.max_model_len, capacity)
    return msgspec.structs.replace(config, max_model_len=capacity)


def make_runner(config: EngineConfig, clock: Clock) -> Runner:
    """The one place where engines differ; each is imported only if it is wanted."""
    if config.engine == "simulated":
        from replica.runners.simulated import SimulatedRunner

        return SimulatedRunner(config.simulated, clock, config.vocabulary, config.eos_token_ids)
    from replica.build import build

    return build(config)


def make_mover(config: EngineConfig, runner: Runner, reader: Reader | None) -> Mover | None:
    """Make what brings blocks from lower media and neighbours, and saves them there; None: there are none."""
    if runner.memory is None or not (config.host_blocks or reader) or not config.enable_prefix_caching:
        return None
    warn_of_too_much(config.host_blocks * runner.memory.block_bytes)
    host = HostMemory(config.host_blocks, runner.memory.block_bytes)
    disk = open_disk(config, runner, runner.memory.block_bytes) if config.disk_blocks else None
    return Mover(runner.memory, host, config.num_blocks, disk, None if reader is None else reader.pull)


def warn_of_too_much(host_bytes: int) -> None:
    free = free_bytes()
    if host_bytes > free:
        log.warning(
            "--host-kv-gb %.3g is more than the %.3g GB of memory that are free: the system may kill this replica as "
            "its host memory fills; give less",
            host_bytes / GIGABYTE,
            free / GIGABYTE,
        )


def open_disk(config: EngineConfig, runner: Runner, block_bytes: int) -> DiskFile:
    kv_layout = kv_layout_of(config, runner)
    try:
        return open_disk_file(
            Path(config.disk_kv),
            kv_layout=kv_layout,
            block_size=config.block_size,
            payload_bytes=block_bytes,
            num_slots=config.disk_blocks,
        )
    except OSError as error:
        where, why = f"--disk-kv {config.disk_kv}", error.strerror or str(error)
        if error.errno in TOO_LARGE:
            size_gb = config.disk_blocks * block_bytes / GIGABYTE
            raise OSError(f"{where}: {why}; give less than --disk-kv-gb {size_gb:.3g}, or another folder") from error
        raise OSError(f"{where} cannot be used: {why}; give a folder that this user can write to") from error


def make_reader(config: EngineConfig, runner: Runner) -> Reader | None:
    """Make what reads from neighbours, which then read here, too; None: there is no KV, or no secret."""
    if runner.memory is None or config.kv_secret is None or not config.enable_prefix_caching:
        return None
    neighbours = NeighbourConfig(
        secret=config.kv_secret.encode(),
        model=config.model,
        kv_layout=kv_layout_of(config, runner),
        block_size=config.block_size,
        most_tokens=config.max_model_len,
    )
    return Reader(neighbours, runner.memory)


def kv_layout_of(config: EngineConfig, runner: Runner) -> str:
    """Kernels count, too: on a CPU, blocks from elsewhere have the very bits that this replica would compute."""
    from replica.model.config import kv_layout, read_config

    return kv_layout(
        read_config(Path(config.model_path)),
        dtype=config.dtype,
        block_size=config.block_size,
        model=config.model,
        weights_digest=runner.weights_digest,
        arrangement=f"layers, keys and values, tokens, heads; {runner.attention_name}",
    )


def publisher_config(config: EngineConfig) -> PublisherConfig:
    assert config.events is not None
    replica = config.replica or f"{network.gethostname()}-{os.getpid()}"
    curve = None if config.curve_secret is None else load_curve(config.curve_secret, config.curve_clients)
    return PublisherConfig(
        events=config.events,
        replay=config.replay,
        status=config.status,
        snapshot=config.snapshot,
        topic=config.topic or f"kv@{replica}@{config.model}",
        model=config.model,
        curve=curve,
        max_peers=config.events_max_peers,
        replay_bytes=config.events_replay_mib * 2**20,
    )


class Loop:
    """Messages in, one step, messages out."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher | None,
        socket: "zmq.Socket[bytes]",
        parent_pid: int,
        neighbours: Source | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.engine = engine
        self.publisher = publisher
        self.socket = socket
        self.parent_pid = parent_pid
        self.neighbours, self.reader = neighbours, reader
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if neighbours is not None:
            self._poller.register(neighbours.holds.descriptor, zmq.POLLIN)
            engine.scheduler.readers = neighbours.holds.references
        self.compilations = Compilations(engine.config.max_waiting)
        self.stopped = False
        self._check_asked = False
        self._report_at_s = 0.0
        self._now_s = engine.clock.now_s
        self._log_at_s = self._now_s() + LOG_INTERVAL_S

    def run(self) -> None:
        self.greet()
        while not orphaned(self.parent_pid):
            # Take what has come; with nothing to compute, wait for it, or for the next report.
            wait_s = 0.0 if self.engine.busy else self._report_at_s - self._now_s()
            if self.engine.only_loads or (self.compilations and not self.engine.busy):
                wait_s = BESIDE_POLL_S
            while not self.stopped and (ready := dict(self._poller.poll(max(0, round(wait_s * 1000))))):
                if self.socket in ready:
                    self.obey(self.socket.recv())
                if self.neighbours is not None and self.neighbours.holds.descriptor in ready:
                    self.neighbours.holds.serve()
                wait_s = 0.0
            if self.stopped:
                break
            self.turn()
        self.compilations.close()

    def greet(self) -> None:
        config, publisher, neighbours = self.engine.config, self.publisher, self.neighbours
        self._send(
            messages.Hello(
                model=config.model,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                max_model_len=config.max_model_len,
                endpoints=publisher.endpoints if publisher else None,
                incarnation=publisher.incarnation if publisher else 0,
                topic=publisher.config.topic if publisher else "",
                attention=self.engine.runner.attention_name,
                kv_read=neighbours.endpoint if neighbours else "",
                kv_layout=self.reader.config.kv_layout if self.reader else "",
            )
        )

    def turn(self) -> None:
        """Take one step, if there is something to compute, and say what has come of it."""
        for compiled in self.compilations.take():
            refused = compiled if isinstance(compiled, messages.Refused) else self.engine.submit_all(*compiled)
            if refused is not None:
                self._send(refused)
        if self.engine.busy:
            outputs = self.engine.step()
            if outputs:
                self._send(messages.Outputs(outputs))
        else:
            self.engine.settle()
        if self.publisher is not None:
            self.publisher.publish(self.engine.take_events())
        if self._check_asked:
            self._check_asked = False
            try:
                self.engine.check()
            except AssertionError as failed:
                log.error("check failed: %s", failed)
            else:
                log.info("check passed")
        if self._now_s() >= self._report_at_s:
            self._report_at_s = self._now_s() + REPORT_INTERVAL_S
            self.engine.pool.expire(self.engine.clock.now_s())
            stats = self.engine.stats()
            stats.cpu_wait_s = cpu_wait_s()
            if self.neighbours is not None and self.reader is not None:
                counts = {"read": self.neighbours.counts, "pulled": self.reader.counts}
                stats.neighbours = {side: own.snapshot() for side, own in counts.items()}
            if self.publisher is not None:
                self.publisher.report(stats.load)
            self._send(stats)
            if self._now_s() >= self._log_at_s:
                self._log_at_s = self._now_s() + LOG_INTERVAL_S
                if stats.rates.prompt_tokens_per_s or stats.rates.generated_tokens_per_s or stats.load.running:
                    log.info("%s", describe(stats))

    def ask_for_check(self, *_: object) -> None:
        """A signal handler: a step may be half done, so the loop checks when it is."""
        self._check_asked = True

    def obey(self, payload: bytes) -> None:
        message = messages.decode_to_engine(payload)
        if isinstance(message, messages.SubmitAll):
            submits = message.submits
            # Those of a request have the same form; none are left of one that another replica has finished.
            is_constrained = bool(submits) and submits[0].sampling.constraint is not None
            refused = self.compilations.add(submits) if is_constrained else self.engine.submit_all(submits)
            if refused is not None:
                self._send(refused)
        elif isinstance(message, messages.Learn):
            self.compilations.learn(message.vocabulary)
        elif isinstance(message, messages.Cancel):
            for request_id in message.ids:
                self.compilations.cancel(request_id)
                self.engine.cancel(request_id)
        elif isinstance(message, messages.Reset):
            done = self.engine.reset()
            if self.publisher is not None:
                self.publisher.publish(self.engine.take_events())
            self._send(messages.ResetDone(message.id, done))
        elif isinstance(message, messages.Stop):
            self.stopped = True

    def _send(self, message: messages.FromEngine) -> None:
        self.socket.send(messages.encode(message))


def cpu_wait_s() -> float:
    """Return for how long this thread could have run and had no processor; 0.0 where the kernel does not count that."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def describe(stats: messages.Stats) -> str:
    load, rates = stats.load, stats.rates
    return (
        f"running {load.running}, waiting {load.waiting}, cache {rates.utilization:.1%} in use, "
        f"{rates.unreferenced_fraction:.1%} reusable, hit rate {rates.token_hit_rate:.1%}, "
        f"prompt {rates.prompt_tokens_per_s:,.0f} tok/s, generated {rates.generated_tokens_per_s:,.0f} tok/s, "
        f"evictions {rates.evictions_per_s:,.1f}/s, preemptions {stats.preemptions}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
