"""The engine's loop between two steps."""

import os

import zmq

from events.blocks import pack_tokens
from replica.messages import Sampling, Stop, Submit, SubmitAll, encode
from replica.process import Loop
from tests.replica.engines import engine


def test_nothing_more_is_computed_after_a_stop() -> None:
    """A step may take seconds, and a stop waits for its end."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as mine, context.socket(zmq.PAIR) as its:
        mine.linger = its.linger = 0
        mine.bind("inproc://engine")
        its.connect("inproc://engine")
        loop = Loop(engine(), None, its, os.getppid())
        mine.send(encode(SubmitAll([Submit(1, pack_tokens(range(200)), Sampling(max_tokens=4))])))
        mine.send(encode(Stop()))
        loop.run()
        assert loop.engine.busy and loop.engine.steps == 0
