"""Cases of vLLM's own tests, through a router before a replica of ours whose simulated model follows a script."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.replicas import command
from tests.chaos.routers import router
from tests.chaos.test_schema import FAST
from tests.chaos.vllm_cases import CASES, Clients, cases, clients_of
from tests.replica.serving import MODEL

pytestmark = pytest.mark.chaos
# A response has no log-probabilities here, and none is answered later, so there is nothing to cancel.
OPEN = ("responses: log-probabilities", "cancels_no_whole_response")


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    formats = ("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--simulated-answers")
    told = (*FAST, *formats, Path(__file__).with_name("vllm_answers.jsonl"))
    with command(*told) as one, router("--replica", one.url) as front, clients_of(front.url, MODEL) as made:
        yield made


@pytest.mark.parametrize("name", cases(CASES, OPEN))
def test_a_case_of_vllms_tests(clients: Clients, name: str) -> None:
    CASES[name](clients)
