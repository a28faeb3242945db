"""All rules in one table, the most telling first. Each has a section in docs/troubleshooting.md; a test compares."""

from router.doctor import cache_rules, index_rules, routing_rules
from router.doctor.figures import Figures
from router.doctor.findings import Finding, OfReplica, OfRouter, Rule

RULES: tuple[Rule, ...] = (
    OfRouter("no-replicas", routing_rules.no_replicas),
    OfReplica("replica-down", routing_rules.replica_down),
    OfReplica("replica-draining", routing_rules.replica_draining),
    OfReplica("replica-unsteady", routing_rules.replica_unsteady),
    OfRouter("requests-refused", routing_rules.requests_refused),
    OfReplica("caching-off", cache_rules.caching_off),
    OfRouter("salt-per-request", routing_rules.salt_per_request),
    OfReplica("thrashing", cache_rules.thrashing),
    OfReplica("cache-too-small", cache_rules.cache_too_small),
    OfReplica("low-hits", cache_rules.low_hits),
    OfReplica("prompts-not-block-aligned", cache_rules.prompts_not_block_aligned),
    OfReplica("kv-nearly-full", cache_rules.kv_nearly_full),
    OfReplica("preemptions", cache_rules.preemptions),
    OfRouter("hot-replica", routing_rules.hot_replica),
    OfRouter("herding", routing_rules.herding),
    OfReplica("no-events", index_rules.no_events),
    OfReplica("false-claims", index_rules.false_claims),
    OfReplica("index-inexact", index_rules.index_inexact),
    OfReplica("event-lag", index_rules.event_lag),
    OfReplica("event-losses", index_rules.event_losses),
    OfRouter("approximate-prompts", index_rules.approximate_prompts),
    OfReplica("wrong-predictions", index_rules.wrong_predictions),
)


def findings(figures: Figures) -> list[Finding]:
    return [finding for rule in RULES for finding in found(rule, figures)]


def found(rule: Rule, figures: Figures) -> list[Finding]:
    if isinstance(rule, OfRouter):
        told = rule.judge(figures)
        return [] if told is None else [Finding(rule.name, None, *told)]
    judged = ((replica.name, rule.judge(replica, figures)) for replica in figures.replicas)
    return [Finding(rule.name, name, *told) for name, told in judged if told is not None]
