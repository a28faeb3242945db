"""The table of all rules, the most telling first. Each has a section in docs/troubleshooting.md (tested)."""

from router.dashboard.doctor import cache_rules, index_rules, routing_rules
from router.dashboard.doctor.figures import Figures
from router.dashboard.doctor.findings import Finding, ReplicaRule, RouterRule, Rule

RULES: tuple[Rule, ...] = (
    RouterRule("no-replicas", routing_rules.no_replicas),
    ReplicaRule("replica-down", routing_rules.replica_down),
    ReplicaRule("engine-stalled", routing_rules.engine_stalled),
    ReplicaRule("replica-draining", routing_rules.replica_draining),
    ReplicaRule("replica-unsteady", routing_rules.replica_unsteady),
    ReplicaRule("name-taken", routing_rules.name_taken),
    ReplicaRule("starved-of-cpu", routing_rules.starved_of_cpu),
    RouterRule("requests-refused", routing_rules.requests_refused),
    ReplicaRule("caching-off", cache_rules.caching_off),
    RouterRule("salt-per-request", routing_rules.salt_per_request),
    ReplicaRule("billing-line", cache_rules.billing_line),
    ReplicaRule("thrashing", cache_rules.thrashing),
    ReplicaRule("cache-too-small", cache_rules.cache_too_small),
    ReplicaRule("low-hits", cache_rules.low_hits),
    ReplicaRule("prompts-not-block-aligned", cache_rules.prompts_not_block_aligned),
    ReplicaRule("kv-nearly-full", cache_rules.kv_nearly_full),
    ReplicaRule("too-few-at-once", cache_rules.too_few_at_once),
    ReplicaRule("preemptions", cache_rules.preemptions),
    RouterRule("hot-replica", routing_rules.hot_replica),
    RouterRule("herding", routing_rules.herding),
    ReplicaRule("no-events", index_rules.no_events),
    ReplicaRule("false-claims", index_rules.false_claims),
    ReplicaRule("index-inexact", index_rules.index_inexact),
    ReplicaRule("event-lag", index_rules.event_lag),
    ReplicaRule("event-losses", index_rules.event_losses),
    ReplicaRule("unknown-events", index_rules.unknown_events),
    RouterRule("prompts-differ", index_rules.prompts_differ),
    RouterRule("approximate-prompts", index_rules.approximate_prompts),
    ReplicaRule("wrong-predictions", index_rules.wrong_predictions),
)


def findings(figures: Figures) -> list[Finding]:
    return [finding for rule in RULES for finding in found(rule, figures)]


def found(rule: Rule, figures: Figures) -> list[Finding]:
    if isinstance(rule, RouterRule):
        diagnosis = rule.judge(figures)
        return [] if diagnosis is None else [Finding(rule.name, None, *diagnosis)]
    judged = ((replica.name, rule.judge(replica, figures)) for replica in figures.replicas)
    return [Finding(rule.name, name, *diagnosis) for name, diagnosis in judged if diagnosis is not None]
