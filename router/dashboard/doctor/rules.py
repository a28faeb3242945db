"""All rules. Each has a section in docs/troubleshooting.md (tested)."""

from msgspec import Struct

from router.dashboard.doctor import cache_rules, index_rules, routing_rules
from router.dashboard.doctor.figures import Diagnosis, Figures, ReplicaFigures

PAGE = "docs/troubleshooting.md"
RULES = (  # the most telling first
    *("no-replicas", "replica-down", "engine-stalled", "replica-draining", "replica-unsteady", "name-taken"),
    *("starved-of-cpu", "requests-refused", "caching-off", "salt-per-request", "billing-line", "thrashing"),
    *("cache-too-small", "low-hits", "prompts-not-block-aligned", "kv-nearly-full", "too-few-at-once"),
    *("preemptions", "hot-replica", "herding", "no-events", "false-claims", "index-inexact", "event-lag"),
    *("event-losses", "unknown-events", "prompts-differ", "approximate-prompts", "wrong-predictions"),
)
OF_REPLICA = (routing_rules.availability, cache_rules.misses, cache_rules.pressure, index_rules.knowledge)
OF_FLEET = (routing_rules.together, index_rules.prompts)


class Finding(Struct, frozen=True):
    rule: str
    replica: str | None  # None: about the router, or all replicas together
    what: str
    turn: str
    figures: dict[str, float | str]

    @property
    def anchor(self) -> str:
        return f"{PAGE}#{self.rule}"


def findings(figures: Figures) -> list[Finding]:
    found = about_fleet(figures)
    for replica in figures.replicas:
        found += about(replica, figures)
    return in_order(found)


def about_fleet(figures: Figures) -> list[Finding]:
    return [_finding(None, said) for judge in OF_FLEET for said in judge(figures)]


def about(replica: ReplicaFigures, figures: Figures) -> list[Finding]:
    return [_finding(replica.name, said) for judge in OF_REPLICA for said in judge(replica, figures)]


def _finding(replica: str | None, said: Diagnosis) -> Finding:
    return Finding(said.rule, replica, said.what, said.turn, said.figures)


def in_order(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda one: RULES.index(one.rule))
