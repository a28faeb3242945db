"""The load generator's own cost, so that its slowness is not taken for the endpoint's."""

import asyncio
import time

from msgspec import Struct

from lab.percentiles import ordered, percentile

LOOK_EVERY_S = 0.01
LAG_LIMIT_S = 0.005
LAG_SHARE = 0.1  # of a measured latency: a smaller part of it may well be the load generator's
CPU_LIMIT = 0.8  # of a core


class Overhead(Struct, frozen=True):
    cpu_s: float
    cpu_share: float  # of one core
    cpu_per_request_s: float
    cpu_per_output_token_s: float
    lag_p99_s: float  # how late its event loop was
    lag_max_s: float

    def delays(self, latency_p99_s: float | None) -> bool:
        """Return whether a notable part of this latency may be the lag."""
        return latency_p99_s is not None and self.lag_p99_s > max(LAG_LIMIT_S, LAG_SHARE * latency_p99_s)

    @property
    def is_busy(self) -> bool:
        return self.cpu_share > CPU_LIMIT


class OverheadMeter:
    """Measures from its creation until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lags_s: list[float] = []
        self._began_s = self._last_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now_s = time.perf_counter()
        self._lags_s.append(max(0.0, now_s - self._last_s - LOOK_EVERY_S))
        self._last_s = now_s
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def stop(self, requests: int, output_tokens: int) -> Overhead:
        self._timer.cancel()
        self._lags_s.append(max(0.0, time.perf_counter() - self._last_s - LOOK_EVERY_S))
        cpu_s = time.process_time() - self._cpu_s
        lags_s = ordered(self._lags_s)
        return Overhead(
            cpu_s=cpu_s,
            cpu_share=cpu_s / max(time.perf_counter() - self._began_s, 1e-9),
            cpu_per_request_s=cpu_s / max(1, requests),
            cpu_per_output_token_s=cpu_s / max(1, output_tokens),
            lag_p99_s=percentile(lags_s, 0.99),
            lag_max_s=lags_s[-1],
        )
