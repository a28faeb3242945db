"""Puts together a router without its HTTP front: what it knows of replicas, and the tasks that keep this up to date."""

from collections.abc import Callable
from contextlib import aclosing

from router.config import Kubernetes, RouterConfig
from router.core import Router
from router.members.discovery.combined import StaticReplicas
from router.members.discovery.desired import Discovery
from router.members.discovery.file import FileDiscovery
from router.members.discovery.followed_pool import PoolDiscovery
from router.members.discovery.kubernetes import KubernetesDiscovery, KubernetesWatch
from router.members.discovery.objectives import objectives_of
from router.members.discovery.pods import pods_of
from router.members.discovery.registry import RegistryDiscovery
from router.members.discovery.rewrites import rewrites_of, rules_of
from router.members.discovery.slices import slices_of
from router.members.feeds import Feeds
from router.members.members import Members
from router.placement.placement import Placement
from router.prompts.model_rewrites import Rules
from router.prompts.tokenizers import Tokenizers
from router.proxy.admission import Admission
from router.tenants.priorities import Priorities
from router.upkeep import Upkeep


def assembled(config: RouterConfig, admission: Admission) -> tuple[Router, Upkeep]:
    """Raise OSError or ValueError if a tokenizer or a template cannot be read. Call it within a running loop."""
    tokenizers = Tokenizers(
        config.model_dirs, config.chat_templates, config.message_cache_bytes, config.special_tokens_in_text
    )
    placement = Placement(
        config.policy, optimistic_ttl_s=config.optimistic_ttl_s, first_token_timeout_s=config.first_token_timeout_s
    )
    feeds = Feeds(placement.index, lambda name, status: upkeep.heard(name, status), lambda name: upkeep.sized(name))
    router = Router(config, Members(tokenizers.of, config.expected_models), feeds, placement, admission)
    upkeep = Upkeep(router, tokenizers)
    return router, upkeep


def discoveries(config: RouterConfig) -> list[Discovery]:
    found: list[Discovery] = [StaticReplicas(config.replicas)]
    if config.replicas_file is not None:
        found.append(FileDiscovery(config.replicas_file))
    if config.registry is not None:
        found.append(RegistryDiscovery(config.registry))
    if (kubernetes := config.kubernetes) is not None:
        cluster = kubernetes.cluster
        if kubernetes.service is not None:
            found.append(KubernetesDiscovery(cluster, slices_of(cluster.namespace, kubernetes.service)))
        if kubernetes.pods is not None:
            found.append(KubernetesDiscovery(cluster, pods_of(cluster.namespace, kubernetes.pods)))
        if kubernetes.pool is not None:
            found.append(PoolDiscovery(cluster, kubernetes.pool))
    return found


async def follow_objectives(kubernetes: Kubernetes, priorities: Priorities) -> None:
    assert kubernetes.pool is not None, "its objectives are wanted"
    objectives = objectives_of(kubernetes.cluster.namespace, kubernetes.pool, kubernetes.group)
    async with aclosing(KubernetesWatch(kubernetes.cluster, objectives).watch()) as updates:
        async for found in updates:
            priorities.of = {name: objective.priority for name, objective in found.items()}


async def follow_rewrites(kubernetes: Kubernetes, use: Callable[[Rules], None]) -> None:
    assert kubernetes.pool is not None, "its rewrites are wanted"
    rewrites = rewrites_of(kubernetes.cluster.namespace, kubernetes.pool, kubernetes.group)
    async with aclosing(KubernetesWatch(kubernetes.cluster, rewrites).watch()) as updates:
        async for found in updates:
            use(rules_of(found.values()))
