"""InferenceObjectives of a pool (Gateway API Inference Extension, or llm-d; v1alpha2): names with priorities."""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct, field

from router.members.discovery import pool
from router.members.discovery.collection import Collection, Kind
from router.members.discovery.labels import Metadata, Values


class PoolReference(Struct):
    name: str = ""
    group: str = pool.KIND.group


class ObjectiveSpec(Struct, rename="camel"):
    pool_ref: PoolReference = field(default_factory=PoolReference)
    priority: int | None = None


class InferenceObjective(Struct):
    metadata: Metadata
    spec: ObjectiveSpec = field(default_factory=ObjectiveSpec)

    @property
    def order(self) -> tuple[str, ...]:
        return (self.metadata.name,)


class Objective(Struct, frozen=True):
    name: str
    priority: int


def objectives_of(namespace: str, pool_name: str, group: str) -> Collection[InferenceObjective, Objective]:
    kind = Kind(
        "inferenceobjectives",
        group,
        "v1alpha2",
        "the InferenceObjective",
        InferenceObjective,
        partial(_made, pool_name),
    )
    return Collection(kind, f"objectives of pool {namespace}/{pool_name}", "")


def _made(pool_name: str, objective: InferenceObjective, _: Values) -> tuple[Sequence[Objective], Sequence[str]]:
    spec = objective.spec
    if spec.pool_ref != PoolReference(pool_name):
        return (), ()
    return [Objective(objective.metadata.name, spec.priority or 0)], ()
