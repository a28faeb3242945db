"""An agent's conversation hits as much of its prompts in every API, through a router with two replicas."""

import pytest

from replica.model.demo import TEXTS
from tests.chaos.agents import AGENTS, TURNS, converse, hits
from tests.chaos.routers import fleet, router

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

# The demo's template shows no ids of calls, which differ from answer to answer.
ROOM = ("--tokenizer", TEXTS, "--max-model-len", 65_536, "--num-blocks", 8192)
RATES = (
    *("--set=simulated_prefill_tokens_per_s=50_000", "--set=simulated_decode_tokens_per_s=5000"),
    *("--set=simulated_step_overhead=0", "--set=simulated_mean_output_tokens=40"),
)
ROUTER = ("--model-dir", f"demo={TEXTS}", "--log-level", "error")
LEAST_HITS = 0.9


def test_every_api_hits_what_a_chat_hits() -> None:
    with fleet(2, *ROOM, *RATES) as replicas, router(*replicas.as_options, *ROUTER) as served:
        turns = {name: converse(served, agent, f"salt of {name}") for name, agent in AGENTS.items()}
        decisions = served.decisions()
    for name in AGENTS:
        assert [turn.prompt_tokens for turn in turns[name]] == [turn.prompt_tokens for turn in turns["chat"]], name
        assert [turn.said for turn in turns[name]] == [turn.said for turn in turns["chat"]], name
        assert hits(turns[name]) == pytest.approx(hits(turns["chat"]), abs=0.01)
    assert hits(turns["chat"]) > LEAST_HITS
    assert len(decisions) == len(AGENTS) * TURNS and all(one["tokens_exact"] for one in decisions)
