"""The dashboard of a router as users start it: where it says it is, and how it ends with it."""

import http.client
import signal
import time

from tests.chaos.routers import router
from tests.events.processes import DEADLINE_S

AT_ONCE_S = 5.0  # a process that waits for its clients takes its --drain-timeout, 30 s


def test_its_address_is_printed_and_a_signal_ends_it_with_a_page_open() -> None:
    with router(ready=False) as running:
        assert running.out.get(timeout=DEADLINE_S) == f"dashboard on {running.url}/dashboard\n"
        assert running.get("/dashboard").status == 200
        page = http.client.HTTPConnection("127.0.0.1", running.port, timeout=DEADLINE_S)
        page.request("GET", "/dashboard/fleet")
        assert page.getresponse().read()
        began_s = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(DEADLINE_S) == 0
        assert time.monotonic() - began_s < AT_ONCE_S
        page.close()
