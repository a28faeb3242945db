"""A replica that is killed under load: no client sees anything of it."""

import sys

import pytest

from tests.chaos.routers import fleet, http_client, router
from tests.chaos.streams import PACE, all_streams, check_same, resumes_of, streams_halfway, unblocked

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

QUIET = ("--log-level", "error")


async def test_no_client_notices_that_a_replica_was_killed() -> None:
    with fleet(4, *PACE) as replicas, router(*replicas.as_options, *QUIET) as served:
        async with http_client(served.url) as http:
            undisturbed = await all_streams(http)
            streams = await streams_halfway(http)
            await unblocked(replicas.kill, 1)
            told = await streams
        check_same(told, undisturbed)
        counts = resumes_of(served)
        assert counts["resumed"] > 5, "too few streams ran on the killed replica"
        print(f"{counts}; longest pause {max(one.longest_pause_s for one in told):.3f} s")
