"""What a fleet should be: its models, and how many replicas of each. Plain data, as JSON wherever it is kept or sent.

New fields go last in their struct, with a default: a controller may find what an older one has kept.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

Engine: TypeAlias = Literal["native", "simulated", "vllm", "sglang"]

FOREIGN: tuple[Engine, ...] = ("vllm", "sglang")


class Resources(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one replica needs of its node, as Ray counts it."""

    cpus: float = 1.0
    gpus: float = 0.0  # a fraction shares one
    custom: dict[str, float] = {}


class Autoscale(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Between how many replicas there may be, and what decides."""

    min: int
    max: int
    ttft_target_s: float = 1.0  # more replicas when a new prompt would wait for longer than this
    up_after_s: float = 5.0  # for so long without a break
    down_after_s: float = 60.0  # fewer when one less would still be well below the target for so long


class ModelPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model of the fleet, and how each of its replicas is started."""

    name: str  # what clients ask for; no two plans have the same
    model: str  # a folder, or a name that the engine knows
    engine: Engine = "native"
    replicas: int = 1  # to begin with, where autoscale is set
    resources: Resources = Resources()
    tensor_parallel: int = 1
    autoscale: Autoscale | None = None
    environment: dict[str, str] = {}
    options: tuple[str, ...] = ()  # more of the engine's own command line
    drain_timeout_s: float = 60.0  # for running requests, when a replica is stopped
    wedged_after_s: float = 20.0  # a replica that says nothing for so long is killed and started again
    # What routers are told
    tokenizer: str | None = None  # a folder, if it is not `model`
    chat_template: str | None = None  # a file
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that its replicas serve
    resume: bool = False  # of a foreign engine: its answers may go on elsewhere
    api_key_env: str | None = None  # the variable with the key that its replicas demand


class FleetPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    models: tuple[ModelPlan, ...]
    router: tuple[str, ...] = ()  # more of the router's own command line

    def model(self, name: str) -> ModelPlan | None:
        return next((plan for plan in self.models if plan.name == name), None)


class Task(Struct, frozen=True, kw_only=True):
    """One replica to run: a name in the fleet, and the plan that was the model's when it was begun."""

    name: str  # <model>-<number>, fit for file names and URLs
    plan: ModelPlan
    generation: int = 0


encode = msgspec.json.Encoder().encode
