"""Limits of keys hold over all workers of a router."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.http.routes import Role
from router.tenants.admission import Admission, Admitted
from router.tenants.charges import Charge, account_of
from router.tenants.keys import Key, digest_of
from router.tenants.limits import Use
from router.tenants.shared_limits import SharedLimits

WORKERS = 3
FEW = Key(name="few at once", digest=digest_of("0"), max_in_flight=3)
SLOW = Key(name="slowly", digest=digest_of("1"), requests_per_minute=60.0, tokens_per_minute=900.0, tokens_per_day=5e3)
KEYS = [FEW, SLOW]


@pytest.fixture
def shared() -> Iterator[SharedLimits]:
    with tempfile.TemporaryFile() as lock:
        yield SharedLimits(WORKERS, lock, most_keys=4)


STEPS = st.tuples(
    st.sampled_from(["admit", "admit", "prompt", "end", "die"]), st.integers(0, WORKERS - 1), st.sampled_from(KEYS)
)


@given(st.lists(STEPS, max_size=60))
def test_workers_admit_together_what_one_would(steps: list[tuple[str, int, Key]]) -> None:
    with tempfile.TemporaryFile() as lock:
        shared = SharedLimits(WORKERS, lock, most_keys=8)
        workers = [Admission(KEYS, demand_key=True, shared=shared) for _ in range(WORKERS)]
        running: list[list[tuple[Admitted, Charge]]] = [[] for _ in range(WORKERS)]
        alone = SharedLimits()
        for tenths, (step, number, key) in enumerate(steps):
            shared.begin(number)  # as this worker's process would have
            now_s = tenths / 10
            if step == "admit":
                one = charged(alone, key, now_s)
                found = admitted(workers[number], key, now_s)
                assert (found is None) == (one is None)
                if found is not None and one is not None:
                    running[number].append((found, one))
            elif step == "prompt" and running[number]:
                pair = running[number][-1]
                assert pair[0].charge is not None
                assert prompted(pair[0].charge, now_s) == prompted(pair[1], now_s)
                assert pair[0].charge.lines(now_s) == pair[1].lines(now_s)
            elif step == "end" and running[number]:
                ended, one = running[number].pop()
                workers[number].release(ended)
                one.close()
            elif step == "die":
                shared.ended(number)
                for _, one in running[number]:
                    one.close()
                running[number].clear()


def admitted(worker: Admission, key: Key, now_s: float) -> Admitted | None:
    headers = [(b"authorization", b"Bearer %d" % KEYS.index(key))]
    with suppress(ApiError):
        return worker.admit({"headers": headers}, Role.CLIENT, now_s)
    return None


def charged(shared: SharedLimits, key: Key, now_s: float) -> Charge | None:
    account = account_of(key, shared)
    assert account is not None
    with suppress(ApiError):
        return account.admit(now_s)
    return None


def prompted(charge: Charge, now_s: float) -> bool:
    try:
        charge.take_prompt(Use(computed=200, cached=500), now_s)
    except ApiError:
        return False
    return True


def test_keys_share_rows_once_there_are_more_than_rows(shared: SharedLimits) -> None:
    for number in range(9):
        with shared.opened(f"key-{number}") as state:
            state.in_flight += 1
    with shared.opened("key-0") as state:
        assert state.in_flight >= 1


def test_a_process_that_dies_with_the_lock_holds_nobody_up(shared: SharedLimits) -> None:
    pid = os.fork()
    if not pid:
        with shared.opened("key"):
            os._exit(0)
    os.waitpid(pid, 0)
    with shared.opened("key") as state:
        assert state.in_flight == 0
