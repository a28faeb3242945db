"""InferenceModelRewrites of a pool: models under other names.

Of several rules for a model the oldest object's counts, and of one object's the first.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from router.members.discovery.collection import Collection, Kind
from router.members.discovery.labels import Metadata, Values
from router.members.discovery.pool import PoolReference
from router.prompts.model_rewrites import Rules

EXACT = "Exact"


class ModelMatch(Struct):
    value: str = ""
    type: str = EXACT


class Match(Struct):
    model: ModelMatch = field(default_factory=ModelMatch)


class TargetModel(Struct, rename="camel"):
    model_rewrite: str = ""


class Rule(Struct):
    matches: list[Match] | None = None
    targets: list[TargetModel] | None = None


class RewriteSpec(Struct, rename="camel"):
    pool_ref: PoolReference = field(default_factory=PoolReference)
    rules: list[Rule] | None = None


class InferenceModelRewrite(Struct):
    metadata: Metadata
    spec: RewriteSpec = field(default_factory=RewriteSpec)


class Rewrite(Struct, frozen=True):
    """The rules of one object; those without a model are for all."""

    name: str
    rules: tuple[tuple[str | None, str], ...]  # models, and their targets


def rewrites_of(namespace: str, pool_name: str, group: str) -> Collection[InferenceModelRewrite, Rewrite]:
    def made(rewrite: InferenceModelRewrite, _: Values) -> tuple[Sequence[Rewrite], Sequence[str]]:
        if rewrite.spec.pool_ref != PoolReference(pool_name):
            return (), ()
        rules: list[tuple[str | None, str]] = []
        refused = []
        for number, rule in enumerate(rewrite.spec.rules or ()):
            targets, matches, why = rule.targets or [], rule.matches or [], ""
            if len(targets) != 1:
                why = f"it names {len(targets)} targets; a rule has one"
            elif not targets[0].model_rewrite:
                why = "its target has no modelRewrite"
            elif not all(match.model.type == EXACT and match.model.value for match in matches):
                why = f"a match is not the value of a model, of type {EXACT}"
            if why:
                refused.append(f"has a rule that is ignored, number {number + 1}: {why}")
            else:
                models: list[str | None] = [match.model.value for match in matches]
                rules += [(model, targets[0].model_rewrite) for model in models or (None,)]
        return [Rewrite(rewrite.metadata.name, tuple(rules))], refused

    names = "inferencemodelrewrites", group, "v1alpha2", "the InferenceModelRewrite"
    kind = Kind(*names, InferenceModelRewrite, made, order=oldest_first)
    return Collection(kind, f"model rewrites of pool {namespace}/{pool_name}", "")


def oldest_first(rewrite: InferenceModelRewrite) -> tuple[str, ...]:
    return rewrite.metadata.creation_timestamp or "", rewrite.metadata.name


def rules_of(rewrites: Iterable[Rewrite]) -> Rules:
    """Merge the rules of all objects, which come in their order."""
    exact: dict[str, str] = {}
    otherwise: str | None = None
    for rewrite in rewrites:
        for model, target in rewrite.rules:
            if model is not None:
                exact.setdefault(model, target)
            else:
                otherwise = otherwise or target
    return Rules(exact, otherwise)
