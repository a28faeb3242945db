"""The life of a follower's process, whatever it computes on: `python -m MODULE CHANNEL_FD PARENT_PID`.

It does what the engine's process, its parent, says through the channel, and ends with it.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias, TypeVar

from api.process.lifeline import die_with_parent
from replica.parallel.messages import Failed, Ready, encode

Channel: TypeAlias = "Connection[bytes, bytes]"
Result = TypeVar("Result")


class CannotFollow(Exception):
    """The engine has been told why."""


def follow_with(arguments: Sequence[str], follow: Callable[[Channel], object]) -> int:
    """Return the exit status, once the engine is gone or this rank is of no use."""
    channel_fd, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")  # the engine says the rest
    with Connection(channel_fd) as channel:
        try:
            follow(channel)
        except (EOFError, ConnectionError):  # the engine has ended
            return 0
        except CannotFollow:
            pass
    return 1


def tried(
    channel: Channel, prepare: Callable[[], Result], answer_of: Callable[[Result], Ready] = lambda _: Ready()
) -> Result:
    """Tell the engine that this is done, or why it cannot be."""
    try:
        result = prepare()
    except (ValueError, OverflowError, MemoryError, OSError, RuntimeError) as error:
        channel.send_bytes(encode(Failed(str(error) or "out of memory")))
        raise CannotFollow from error
    channel.send_bytes(encode(answer_of(result)))
    return result
