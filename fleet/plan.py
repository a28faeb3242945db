"""The desired fleet: its models, and how many replicas of each. Plain data, kept and sent as JSON.

New fields go last in their struct, with a default: a controller may find what an older one has kept.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from engines import Launched

Engine: TypeAlias = Literal["native", "simulated", Launched]
Role: TypeAlias = Literal["prefill", "decode", "both"]

FOREIGN: tuple[Engine, ...] = get_args(Launched)
MAX_MODELS = 1000
MAX_REPLICAS = 1000  # the limit for a model
LONGEST_NAME = 120  # a replica's name has a number after it, and routers take 128 characters
LONGEST_S = 1e8  # three years
SHORTEST_S = 0.001
MAX_RESOURCES = 1e9
MAX_RANKS = 1024  # the limit for one replica, all on one node

# Decoding enforces the bounds; `check` has the rules that bounds cannot express.
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_REPLICAS)]
Bound: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]
Amount: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_RESOURCES)]
SomeAmount: TypeAlias = Annotated[float, Meta(gt=0.0, le=MAX_RESOURCES)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
SomeSeconds: TypeAlias = Annotated[float, Meta(ge=SHORTEST_S, le=LONGEST_S)]


class Resources(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The resources that one replica needs, as Ray counts them."""

    cpus: Amount = 1.0
    gpus: Amount = 0.0  # a fraction shares one
    custom: dict[str, Amount] = {}


class Autoscale(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Between how many replicas there may be, and what decides."""

    min: Bound
    max: Bound
    ttft_target_s: SomeSeconds = 1.0  # more replicas when a new prompt would wait for longer than this
    up_after_s: Seconds = 5.0  # it has to be up this long without a break
    down_after_s: Seconds = 60.0  # fewer when one less would still be well below the target for this long


class ModelPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model of the fleet, and how to start its replicas."""

    name: Name  # no two plans have the same
    model: str  # a folder, or a name that the engine knows
    engine: Engine = "native"
    replicas: Count = 1  # to begin with, where autoscale is set
    resources: Resources = Resources()
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    autoscale: Autoscale | None = None
    environment: dict[str, str] = {}
    options: tuple[str, ...] = ()  # more of the engine's own command line
    drain_timeout_s: Seconds = 60.0  # running requests have this long when a replica is stopped
    wedged_after_s: SomeSeconds = 20.0  # a replica that says nothing for this long is killed and started again
    # Routers are told these
    tokenizer: str | None = None  # a folder, if it is not `model`
    chat_template: str | None = None  # a file
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that its replicas serve
    resume: bool = False  # a foreign engine's answers may go on elsewhere
    api_key_env: str | None = None  # the variable with the key that its replicas demand
    serves: Name | None = None  # the name that clients ask for, if it is not `name`; several plans may serve one
    role: Role | None = None  # the half of a request that its replicas take; None: whole requests

    @property
    def served_name(self) -> str:
        return self.serves or self.name


class FleetPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    models: Annotated[tuple[ModelPlan, ...], Meta(max_length=MAX_MODELS)]
    router: tuple[str, ...] = ()  # more of the router's own command line

    def model(self, name: str) -> ModelPlan | None:
        return next((plan for plan in self.models if plan.name == name), None)


NO_MODELS = FleetPlan(models=())


class Task(Struct, frozen=True, kw_only=True):
    """One replica to run: its name, and its model's plan when it was begun."""

    name: str  # <model>-<number>, fit for file names and URLs
    plan: ModelPlan
    generation: int = 0
    warm_from: tuple[str, ...] = ()  # where replicas of its model read blocks from each other, as it is begun


def mistakes(model: ModelPlan) -> Iterator[tuple[str, str]]:
    """Mistakes of one model that its types allow: the field, and what to do."""
    for field, name in ("name", model.name), ("serves", model.serves or ""):
        if not name.isprintable():
            yield field, f"the name {name!r} has a character that cannot be printed; leave it out"
        if name.startswith("-"):
            yield field, f"the name {name!r} looks like an option; leave out the dash"
    bounds = model.autoscale
    if bounds is not None and bounds.min > bounds.max:
        yield "autoscale", f"{model.name} is to scale from {bounds.min} to {bounds.max}; make max {bounds.min} or more"


def check(plan: FleetPlan) -> None:
    """Raise ValueError, with what to do, for a mistake that the types allow."""
    names: set[str] = set()
    for model in plan.models:
        for _, message in mistakes(model):
            raise ValueError(message)
        if model.name in names:
            raise ValueError(f"two models have the name {model.name!r}; give each one of its own")
        names.add(model.name)


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(FleetPlan).decode


def bounded(plan: FleetPlan) -> FleetPlan:
    """Return the plan as a controller would decode it; ValueError if it would refuse it."""
    check(plan)
    try:
        return _decode(encode(plan))
    except msgspec.ValidationError as error:
        raise ValueError(f"the plan cannot be used: {error}") from error
