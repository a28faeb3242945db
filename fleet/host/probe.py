"""Asks a replica whether it works, and how much it has to do."""

import time
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from engines import profile_of
from engines.metrics import scraped_queues
from events.native import Load
from fleet.host.report import ReplicaAddress
from router.console.asking import options

TIMEOUT_S = 2.0  # of a replica that works, an answer takes milliseconds


class _Pool(Struct, frozen=True):
    total: int = 0


class _Rates(Struct, frozen=True):
    token_hit_rate: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    token_s: float = 0.0


class _LoadResponse(Struct):
    """The part of our replicas' GET /load that is used here."""

    ready: bool
    load: Load
    pool: _Pool = _Pool()
    rates: _Rates = _Rates()
    open_requests: int = 0
    block_size: int = 0


_decode = msgspec.json.Decoder(_LoadResponse).decode


class Probe:
    def __init__(self, place: ReplicaAddress, key: str | None) -> None:
        self._place = place
        self._http = httpx2.AsyncClient(base_url=place.url, **options(key or None, TIMEOUT_S))

    async def look(self) -> dict[str, Any] | None:
        """Return the measured fields of a Report; None without a good answer in time."""
        try:
            profile = profile_of(self._place.engine)
            if profile.describes_itself:
                return _of_ours(_decode(await self._get("/load")))
            await self._get(profile.health_path)
            queue = scraped_queues(await self._get("/metrics"), profile.metrics).get(None)
        except (httpx2.HTTPError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        running, waiting = queue or (0, 0)
        load = Load(running=running, waiting=waiting)
        return {"load": load, "open_requests": running + waiting, "measured_at": time.time()}

    async def _get(self, path: str) -> bytes:
        answer = await self._http.get(path)
        answer.raise_for_status()
        return answer.content

    async def close(self) -> None:
        await self._http.aclose()


def _of_ours(answer: _LoadResponse) -> dict[str, Any] | None:
    if not answer.ready:
        return None
    return {
        "load": answer.load,
        "hit_rate": answer.rates.token_hit_rate,
        "prompt_tokens_per_s": answer.rates.prompt_tokens_per_s,
        "generated_tokens_per_s": answer.rates.generated_tokens_per_s,
        "token_s": answer.rates.token_s,
        "open_requests": answer.open_requests,
        "total_blocks": answer.pool.total,
        "block_size": answer.block_size,
        "measured_at": time.time(),
    }
