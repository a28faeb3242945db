"""An agent's conversation in each API, through a router with two replicas: the share of its prompts that hits."""

from tests.chaos.agents import AGENTS, TOOLS, TURNS, converse, hits
from tests.chaos.routers import fleet, router
from tests.chaos.test_router_agents import RATES, ROOM, ROUTER


def run(_: int) -> None:
    """Measure once: every round has the same tokens."""
    print(f"{TURNS} turns with {TOOLS} tools, a simulated engine, 2 replicas")
    with fleet(2, *ROOM, *RATES) as replicas, router(*replicas.as_options, *ROUTER) as served:
        found = {name: converse(served, agent, f"of {name}") for name, agent in AGENTS.items()}
    print("| API | prompt tokens | cached | hits | against chat |\n" + "| --- " * 5 + "|")
    for name, turns in found.items():
        prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
        against = hits(turns) - hits(found["chat"])
        print(f"| {name} | {prompt:,} | {cached:,} | **{hits(turns):.2%}** | {against:+.2%} |")
