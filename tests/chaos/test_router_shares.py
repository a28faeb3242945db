"""Fair shares of whole routers: who asks for little does not wait for who floods the replicas."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.routers import RouterProcess, fleet, router
from tests.events.processes import wait_until
from tests.replica.serving import MODEL, Answer

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

REPLICAS, RATE = 2, 4000
SIMULATED = (
    *("--engine", "simulated", "--served-model-name", MODEL, "--model", "demo", "--set=simulated_step_overhead=0"),
    *(f"--set=simulated_prefill_tokens_per_s={RATE}", "--set=simulated_decode_tokens_per_s=5000"),
)
KEYS = """
[keys.flood]
key = "flood"
[keys.quiet]
key = "quiet"
[keys.gateway]
key = "gateway"
tenant_header = "X-Tenant"
"""
CLASSES = """
[classes.standard]
first_token_s = 3
[classes.batch]
first_token_s = {first_token_s}
[keys.flood]
key = "flood"
class = "batch"
[keys.quiet]
key = "quiet"
class = "interactive"
"""
FLOOD = 100  # prompts
WORDS = 150  # of each
LEARNED = 6  # prompts, by which the speed of the replicas is known


@pytest.fixture
def text() -> str:
    return KEYS


@pytest.fixture
def running(tmp_path: Path, text: str) -> Iterator[RouterProcess]:
    keys = tmp_path / "keys.toml"
    keys.write_text(text)
    with fleet(REPLICAS, *SIMULATED) as replicas, router(*replicas.as_options, "--api-keys", keys) as made:
        for number in range(LEARNED):
            ask(made, "quiet", long(f"learn {number}"))
        yield made


def ask(running: RouterProcess, key: str, text: str, tenant: str = "") -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"} | ({"x-tenant": tenant} if tenant else {})
    assert running.post("/v1/chat/completions", body, **headers).status == 200


def long(name: str) -> str:
    return " ".join(f"{name}-{word}" for word in range(WORDS))


def goes_before(running: RouterProcess, flood: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Have one tenant flood the replicas; return whether another one's request is answered before half of it."""
    pool = ThreadPoolExecutor(FLOOD + 1)
    asked: list[Future[None]] = []
    for number in range(FLOOD):
        asked.append(pool.submit(ask, running, flood[0], long(str(number)), *flood[1:]))

    def answered() -> int:
        return sum(one.done() for one in asked)

    wait_until(lambda: answered() >= FLOOD // 10, "a tenth of the flood is answered")
    most = answered() + FLOOD // 2
    question = pool.submit(ask, running, other[0], "a short question", *other[1:])
    wait_until(lambda: question.done() or answered() >= most, "the question, or another half, is answered", 60)
    found = question.done()
    running.process.kill()  # ends what is left of the flood
    pool.shutdown()
    return found


CASES = {
    "another key": (("flood",), ("quiet",), True),
    "another client of a gateway": (("gateway", "busy"), ("gateway", "calm"), True),
    "the same key, which waits for its own prompts": (("flood",), ("flood",), False),
    "the same client of a gateway": (("gateway", "busy"), ("gateway", "busy"), False),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.grid if "gateway" in case else ()) for case in CASES]
)
def test_a_flood_delays_its_own_tenant_alone(running: RouterProcess, case: str) -> None:
    flood, other, goes_first = CASES[case]
    assert goes_before(running, flood, other) == goes_first


@pytest.mark.grid
@pytest.mark.parametrize("text", [CLASSES.format(first_token_s=600)])
def test_batch_work_lets_interactive_prompts_pass(running: RouterProcess) -> None:
    assert goes_before(running, ("flood",), ("quiet",))


@pytest.mark.grid
@pytest.mark.parametrize("text", [CLASSES.format(first_token_s=4)])
def test_batch_work_that_would_be_late_is_refused_and_the_rest_is_answered_in_time(running: RouterProcess) -> None:

    def answered(number: int) -> Answer:
        body = {"model": MODEL, "messages": [{"role": "user", "content": long(f"batch {number}")}], "max_tokens": 1}
        return running.post("/v1/chat/completions", body, authorization="Bearer flood")

    with ThreadPoolExecutor(FLOOD) as pool:
        found = list(pool.map(answered, range(FLOOD)))
    refused = [one for one in found if one.status != 200]
    assert 0 < len(refused) < FLOOD
    for one in refused:
        assert (one.status, one.error["code"]) == (503, "class_refused")
        assert int(one.headers["retry-after"]) >= 1
    metrics = running.get("/metrics").body.decode()
    assert f'class_refusals_total{{class="batch"}} {len(refused)}.0' in metrics
    assert f'class_answers_total{{class="interactive"}} {LEARNED}.0' in metrics
