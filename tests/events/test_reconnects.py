"""Connecting again: at once after a cut, later and later where the publisher ends each connection at once."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from events.native import Load
from events.publisher import Publisher
from events.sockets.link import LET_IN_S, LONGEST_PAUSE_S, RETRY_AT_MOST_S, Reconnects
from events.subscriber import Subscriber
from tests.events.test_subscriber import config, native, stored, until


def pauses(reconnects: Reconnects, lives_s: list[float]) -> Iterator[float | None]:
    """Yield the pause after each connection; the next one is made when it is over."""
    now_s = 100.0
    for life_s in lives_s:
        reconnects.connected(now_s)
        now_s += life_s
        pause_s = reconnects.lost(now_s)
        yield pause_s
        now_s += pause_s or 0.05


def test_after_a_cut_it_connects_again_at_once() -> None:
    assert set(pauses(Reconnects(), [LET_IN_S + 0.01, 60.0, LET_IN_S + 0.01])) == {None}
    assert list(pauses(Reconnects(), [60.0, 0.0, 60.0, 0.0])) == [None] * 4, "one short outage is no pattern"


def test_pauses_grow_while_every_connection_ends_at_once() -> None:
    first, *rest = pauses(Reconnects(jitter=lambda: 1.0), [0.0] * 12)
    assert first is None
    assert rest[:4] == [0.2, 0.4, 0.8, 1.6]
    assert rest[-4:] == [LONGEST_PAUSE_S] * 4


def test_a_connection_that_lasts_ends_the_pauses() -> None:
    assert list(pauses(Reconnects(), [0.0] * 10 + [LET_IN_S + 0.01, 0.0]))[-2:] == [None, None]


def test_pauses_differ_from_subscriber_to_subscriber() -> None:
    last = [list(pauses(Reconnects(), [0.0] * 12))[-1] for _ in range(20)]
    assert len(set(last)) > 1
    assert all(LONGEST_PAUSE_S / 2 <= pause_s <= LONGEST_PAUSE_S for pause_s in last if pause_s is not None)


def test_a_handshake_that_never_succeeds_counts_as_a_short_connection() -> None:
    reconnects = Reconnects()
    assert reconnects.lost(1.0) is None
    assert reconnects.lost(2.0) is not None


def test_nobody_is_looked_for_without_a_pause() -> None:
    reconnects = Reconnects(jitter=lambda: 1.0)
    tries = [reconnects.retry() for _ in range(20)]
    assert tries[:3] == [0.05, 0.1, 0.2] and tries[-1] == RETRY_AT_MOST_S
    reconnects.connected(0.0)
    assert reconnects.retry() == 0.05


@pytest.mark.parametrize("full", ["events", "status"])
async def test_a_subscriber_that_is_shut_out_does_not_hammer_and_gets_in_when_there_is_room(full: str) -> None:
    with Publisher(config(max_peers=1)) as publisher, zmq.Context() as context, context.socket(zmq.SUB) as other:
        other.linger = 0
        other.subscribe(b"")
        other.connect(getattr(publisher.endpoints, full))

        def is_in() -> bool:
            publisher.report(Load())
            publisher.publish([stored(1)])
            return bool(other.poll(0))

        await until(is_in)
        async with Subscriber() as subscriber:
            view = subscriber.add(native(publisher))
            await until(lambda: publisher.stats.refused_peers > 0)
            await asyncio.sleep(2)  # no condition: it is counted what happens meanwhile
            assert publisher.stats.refused_peers <= 10
            assert view.stream.stats.snapshots <= 10
            other.close()

            def heard() -> bool:
                publisher.report(Load())
                return view.inexact is None and view.stream.stats.digests_compared > 0

            await until(heard)
