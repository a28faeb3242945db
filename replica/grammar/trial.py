"""`python -m replica.grammar.trial PARENT_PID`: tries constraints before the engine compiles them, one at a time.

A constraint is a client's program, and the compiler a library: what hangs, crashes or takes too much memory does so
here. Four bytes of length are in front of every message. The first one is the vocabulary; after that, each constraint
is answered with the reason that it is refused for, empty if it is accepted.
"""

import logging
import os
import random
import resource
import struct
import sys
import threading
import time
from typing import BinaryIO

import msgspec
import numpy as np

from api.openai.constraints import Constraint
from api.process.lifeline import die_with_parent
from replica.grammar.compiler import NotCompiled, grammar_of, matcher_of, tokenizer_of
from replica.grammar.matcher import Matcher, boolean
from replica.grammar.vocabulary import Vocabulary, unpacked_vocabulary

LENGTH = struct.Struct("<I")
MAX_CPU_S = 1.0  # the time for one constraint
MAX_BYTES = 64 * 2**20  # the memory that it keeps
HEADROOM_BYTES = 512 * 2**20  # the memory that it takes meanwhile
STACK_BYTES = 2 * 2**20  # a quarter of the engine's, so nothing too deep for the engine gets there
MAX_CHARACTERS = 1000  # the length of a reason
STEPS = 32  # masks of a random answer
NICENESS = 5  # the engine's steps come first


def main(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    logging.disable()  # the reason is said in the answer
    os.nice(NICENESS)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    packed = _received(source)
    if packed is None:
        return
    vocabulary = unpacked_vocabulary(packed)
    trial = Trial(vocabulary)
    limit = _pages("size") + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while (message := _received(source)) is not None:
        reason = trial.reason(msgspec.msgpack.decode(message, type=Constraint))[:MAX_CHARACTERS].encode()
        sink.write(LENGTH.pack(len(reason)) + reason)
        sink.flush()


class Trial:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary)

    def reason(self, constraint: Constraint) -> str:
        """Return why the constraint is refused; empty if it is not."""
        began_s, before = time.thread_time(), _pages("resident")
        try:
            matcher = Matcher(matcher_of(self._tokenizer, grammar_of(constraint)), self._vocabulary)
            # Follow a random answer: much is only built when it is first needed.
            answer: list[int] = []
            draw = random.Random(0)
            while len(answer) < STEPS and not (answer and answer[-1] in self._vocabulary.eos_ids):
                matcher.follow(answer)
                allowed = np.flatnonzero(boolean(matcher.allowed(), len(self._vocabulary.tokens)))
                if matcher.failed:
                    raise NotCompiled(matcher.reason)
                answer.append(int(draw.choice(allowed)))
        except NotCompiled as error:
            return str(error)
        cpu_s, kept = time.thread_time() - began_s, _pages("resident") - before
        if cpu_s > MAX_CPU_S:
            return f"it takes {cpu_s:.1f} s to compile; at most {MAX_CPU_S:g} s are allowed"
        if kept > MAX_BYTES:
            return f"it takes {kept >> 20} MiB when compiled; at most {MAX_BYTES >> 20} MiB are allowed"
        return ""


def _received(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if head else None


def _pages(which: str) -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[which == "resident"]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
