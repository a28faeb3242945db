"""A router that follows replicas as the real one does, and is sent no requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from api.process.settings import Unusable
from lab.shadow.engines import Sample
from router.config import RouterConfig
from router.members.discovery.desired import CombinedDiscovery
from router.process.front import assembled, discoveries
from router.proxy.services import Services
from router.tenants.admission import Admission

READY_WITHIN_S = 30.0
LOOK_S = 0.05


class Followed(Struct, frozen=True):
    """A replica, as it is known at the end."""

    name: str
    models: tuple[str, ...]
    native: bool
    doubt: str | None  # why its tree may differ from its cache; None: it is exact
    capacity_tokens: int  # 0: unknown
    prefill_tokens_per_s: float  # 0: unknown


@asynccontextmanager
async def following(config: RouterConfig) -> AsyncIterator[Services]:
    try:
        router, upkeep = assembled(config, Admission())
    except (OSError, ValueError) as error:
        raise Unusable(str(error)) from error
    discovery = CombinedDiscovery(discoveries(config))
    tasks = [asyncio.create_task(discovery.run(upkeep.apply)), asyncio.create_task(upkeep.tick())]
    try:
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await upkeep.close()
        router.feeds.close()
        await router.reading.close()
        router.close()


async def wait_ready(services: Services) -> None:
    """Wait until all replicas are followed; some are enough after a while. Raise Unusable if there is none."""
    until_s = services.now_s() + READY_WITHIN_S
    while services.lifecycle.not_ready(all_of_them=True) is not None and services.now_s() < until_s:
        await asyncio.sleep(LOOK_S)
    if (why_not := services.lifecycle.not_ready()) is not None:
        raise Unusable(f"{why_not}; check --replica")


def followed(services: Services, samples: dict[str, Sample]) -> list[Followed]:
    found = []
    for member in services.members:
        sample, tells = samples.get(member.server.name), member.profile.publishes_status
        capacity_tokens = sample.capacity_tokens if sample is not None else 0
        rate = member.candidate.prefill_tokens_per_s if tells else 0.0
        found.append(Followed(member.name, member.models, tells, services.doubt(member), capacity_tokens, rate))
    return found
