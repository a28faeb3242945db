"""Tenants and classes in simulated fleets: they change nothing where nothing waits."""

import pytest

from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest, at_rate, coarsened
from router.placement.classes import FIRST_TOKEN_S, NAMES, WEIGHTS, ServiceClass
from router.placement.cost import Tenant
from tests.lab.traffic import agents, conversations

FLOOD = Tenant("flood")
SETTINGS = Settings(replicas=3)
CLASSES = [ServiceClass(name, level, FIRST_TOKEN_S[name], WEIGHTS[name]) for level, name in enumerate(NAMES)]
TENANTS = [Tenant(f"tenant-{number}", weight=number + 1, service=CLASSES[number]) for number in range(3)]


def run(trace: Trace, tenants: list[Tenant | None]) -> list[Job]:
    requests = [one._replace(tenant=tenants[number % len(tenants)]) for number, one in enumerate(trace.requests)]
    return simulated(Trace(trace.name, trace.block_tokens, requests), SETTINGS, "cost", 0)


def paced(load: float) -> Trace:
    return at_rate(conversations(200), load * SETTINGS.replicas * SETTINGS.prefill_tokens_per_s)


def seen(jobs: list[Job]) -> list[tuple[int, float, float]]:
    return [(job.replica, job.first_s, job.ended_s) for job in jobs]


@pytest.mark.parametrize("tenants", [[TENANTS[2]], [Tenant("a"), Tenant("b")], [*TENANTS]])
def test_one_tenant_and_tenants_and_classes_that_need_not_wait_change_no_decision(tenants: list[Tenant | None]) -> None:
    trace = paced(0.02 if len(tenants) > 1 else 0.9)
    assert seen(run(trace, tenants)) == seen(run(trace, [None]))


def test_under_pressure_a_higher_class_comes_first_and_a_lower_one_within_its_bound() -> None:
    jobs = run(paced(3.0), [*TENANTS])
    mean_s = []
    for tenant in TENANTS:
        of_class = [job for job in jobs if job.request.tenant == tenant and not job.is_refused]
        mean_s.append(sum(job.ttft_s for job in of_class) / len(of_class))
    assert mean_s[0] < mean_s[1] < mean_s[2]
    assert max(job.ttft_s for job in jobs if not job.is_refused) < 3 * FIRST_TOKEN_S["batch"]
    assert any(job.is_refused for job in jobs if job.request.tenant == TENANTS[2])


def hits_beside(flood: bool, *, forgetful: bool) -> float:
    """The hits of three tenants whose prompts come again, beside cold ones of a fourth: twice what is computed."""
    settings = Settings(replicas=1, capacity_tokens=160_000, forgetful=forgetful)
    speed, tokens = settings.prefill_tokens_per_s, 4096
    trace = coarsened(at_rate(agents(100), 0.7 * speed), 16)
    requests = [one._replace(tenant=TENANTS[number % 3]) for number, one in enumerate(trace.requests)]
    for number in range(int(trace.span_s * 2 * speed / tokens) if flood else 0):
        blocks = tuple(range(10**6 + number * tokens, 10**6 + number * tokens + tokens // trace.block_tokens))
        requests.append(TraceRequest(number * tokens / (2 * speed), tokens, 16, blocks, tenant=FLOOD))
    requests.sort(key=lambda one: one.at_s)
    jobs = simulated(Trace("", trace.block_tokens, requests), settings, "cost", 0)
    of_three = [job for job in jobs if job.request.tenant != FLOOD and not job.is_refused]
    return 1 - sum(job.uncached_tokens for job in of_three) / sum(job.request.input_tokens for job in of_three)


def test_a_flood_of_prompts_that_do_not_come_again_takes_little_of_what_others_come_back_to() -> None:
    alone = hits_beside(False, forgetful=True)
    assert alone == hits_beside(False, forgetful=False)
    assert hits_beside(True, forgetful=True) > alone - 0.05 > hits_beside(True, forgetful=False) + 0.05
