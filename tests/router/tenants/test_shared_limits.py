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
from router.proxy.admission import Admission, Admitted
from router.tenants.keys import Key, digest_of
from router.tenants.limits import Usage
from router.tenants.shared_limits import SharedLimits

WORKERS = 3
FEW = Key(name="few at once", digest=digest_of("0"), max_in_flight=3)
SLOW = Key(name="slowly", digest=digest_of("1"), requests_per_minute=60.0)
KEYS = [FEW, SLOW]


@pytest.fixture
def shared() -> Iterator[SharedLimits]:
    with tempfile.TemporaryFile() as lock:
        yield SharedLimits(WORKERS, lock, most_keys=4)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "end", "die"]), st.integers(0, WORKERS - 1), st.sampled_from(KEYS)
        ),
        max_size=60,
    )
)
def test_workers_admit_together_what_one_would(steps: list[tuple[str, int, Key]]) -> None:
    with tempfile.TemporaryFile() as lock:
        shared = SharedLimits(WORKERS, lock, most_keys=8)
        workers = [Admission(KEYS, demand_key=True, shared=shared) for _ in range(WORKERS)]
        running: list[list[Admitted]] = [[] for _ in range(WORKERS)]
        alone = {key.name: Usage() for key in KEYS}
        for tenths, (step, number, key) in enumerate(steps):
            shared.begin(number)  # as this worker's process would have
            if step == "admit":
                usage = alone[key.name]
                found = admitted(workers[number], key, tenths / 10)
                assert (found is not None) == is_allowed(usage, key, tenths / 10)
                if found is not None:
                    usage.in_flight += 1
                    running[number].append(found)
            elif step == "end" and running[number]:
                ended = running[number].pop()
                workers[number].release(ended)
                alone[name_of(ended)].in_flight -= 1
            elif step == "die":
                shared.ended(number)
                for ended in running[number]:
                    alone[name_of(ended)].in_flight -= 1
                running[number].clear()


def admitted(worker: Admission, key: Key, now_s: float) -> Admitted | None:
    headers = [(b"authorization", b"Bearer %d" % KEYS.index(key))]
    with suppress(ApiError):
        return worker.admit(headers, Role.CLIENT, None, now_s)
    return None


def is_allowed(usage: Usage, key: Key, now_s: float) -> bool:
    try:
        usage.take(key, now_s)
    except ApiError:
        return False
    return True


def name_of(ended: Admitted) -> str:
    assert ended.key is not None
    return ended.key.name


def test_keys_share_rows_once_there_are_more_than_rows(shared: SharedLimits) -> None:
    for number in range(9):
        with shared.opened(f"key-{number}"):
            pass
    with shared.opened("key-0") as usage:
        assert usage.in_flight >= 1


def test_a_process_that_dies_with_the_lock_holds_nobody_up(shared: SharedLimits) -> None:
    pid = os.fork()
    if not pid:
        with shared._locked():
            os._exit(0)
    os.waitpid(pid, 0)
    with shared.opened("key") as usage:
        assert usage.in_flight == 0
