"""Makes the plan, and the router's configuration, from the command line or a fleet.toml."""

import copy
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import click
import msgspec
from click.core import ParameterSource

from api.process.settings import Unusable
from fleet.plan import FOREIGN, FleetPlan, ModelPlan
from fleet.toml.options import OWN_OF_ROUTER
from replica.cli import replica
from replica.config import ReplicaConfig
from replica.settings.configure import config_from as replica_config_from
from replica.settings.options import TABLE as REPLICA_TABLE
from router.config import RouterConfig
from router.process.cli import router
from router.process.configure import config_from as router_config_from

FLEET_KEY = "WARMROUTE_FLEET_KEY"


class Settings(NamedTuple):
    """The command line's settings beside the plan."""

    host: str
    port: int
    ray: bool
    address: str | None
    namespace: str
    controller_port: int
    router: bool
    follow: bool
    log_dir: str | None


OWN_OF_EACH = ("host", "port", "events_host", "events_port", "kv_host", "kv_port", "replica_name", "die_with_parent")
OWN_OF_THE_FLEET = ("model", "engine")
KEY = "WARMROUTE_API_KEY"
KV_SECRET = "WARMROUTE_KV_SECRET"


def replica_config(model: str, engine: str, options: Sequence[str]) -> ReplicaConfig:
    """Read the replicas' options here first, so that a mistake costs no start."""
    arguments = ["--model", model, "--engine", engine, *options]
    with replica.make_context("warmroute replica", arguments, max_content_width=100) as ctx:
        for key in OWN_OF_EACH:
            if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE:
                name = REPLICA_TABLE.all[key].option
                raise Unusable(f"{name} behind -- would be the same for every replica; leave it out")
        for word in options:
            if word.partition("=")[0] in ("--model", "--engine"):
                raise Unusable(f"{word} behind -- is set by the fleet; write --model or --simulated before the --")
        return replica_config_from(ctx)


def one_model(model: str, engine: str, replicas: int, policy: str, options: Sequence[str]) -> FleetPlan:
    """The plan that the command line makes.

    Where the model lies is found out once, before: no replica needs the network for it, neither now nor when it is
    started again.
    """
    config = replica_config(model, engine, options)
    plan = ModelPlan(
        name=config.engine.model,
        model=config.engine.model_path or model,
        engine="simulated" if engine == "simulated" else "native",
        replicas=replicas,
        environment=settings_here(),
        options=tuple(options),
        drain_timeout_s=config.drain_timeout_s,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
    )
    return FleetPlan(models=(plan,), router=("--policy", policy))


def complete(plan: FleetPlan) -> FleetPlan:
    """Complete a file's plan with the models' folders and tokenizers."""
    return msgspec.structs.replace(plan, models=tuple(map(_complete, plan.models)))


def _complete(plan: ModelPlan) -> ModelPlan:
    key = plan.api_key_env  # it may not be set on the replicas' machines
    environment = ({key: os.environ[key]} if key and key in os.environ else {}) | plan.environment
    if plan.engine in FOREIGN:
        folder = plan.tokenizer or (plan.model if os.path.isdir(plan.model) else None)
        return msgspec.structs.replace(plan, environment=environment, tokenizer=folder)
    config = replica_config(plan.model, plan.engine, plan.options)
    return msgspec.structs.replace(
        plan,
        model=config.engine.model_path or plan.model,
        environment=settings_here() | environment,
        tokenizer=plan.tokenizer or config.tokenizer,
        chat_template=plan.chat_template or config.chat_template,
    )


def settings_here() -> dict[str, str]:
    """The settings of replicas in the environment, which processes on other machines do not inherit."""
    names = (f"WARMROUTE_{key.upper()}" for key in REPLICA_TABLE.all if key not in (*OWN_OF_EACH, *OWN_OF_THE_FLEET))
    return {name: os.environ[name] for name in names if name in os.environ}


def with_kv_secrets(plan: FleetPlan) -> FleetPlan:
    """Give each model a random secret with which its replicas read each other's blocks, unless it has one."""
    generated = {model.served_name: secrets.token_urlsafe(32) for model in plan.models}
    return msgspec.structs.replace(
        plan,
        models=tuple(
            msgspec.structs.replace(model, environment={KV_SECRET: generated[model.served_name]} | model.environment)
            if model.engine == "native"
            else model
            for model in plan.models
        ),
    )


def router_config(plan: FleetPlan, host: str, port: int) -> RouterConfig:
    """Return the router's configuration, with the replicas' tokenizers, templates and key, but no replicas."""
    own = ["--host", host, "--port", str(port)]
    params = [copy.copy(param) for param in router.params]
    for param in params:
        if param.name in OWN_OF_ROUTER:
            param.envvar = None
    known = copy.copy(router)
    known.params = params
    with known.make_context("warmroute router", [*plan.router, *own]) as ctx:
        config = router_config_from(ctx)
    return msgspec.structs.replace(
        config,
        replica_api_key=config.replica_api_key or os.environ.get(KEY),
        model_dirs={model.served_name: model.tokenizer for model in plan.models if model.tokenizer},
        chat_templates={model.served_name: model.chat_template for model in plan.models if model.chat_template},
    )


def drain_timeout_s(plan: FleetPlan) -> float:
    return max((model.drain_timeout_s for model in plan.models), default=0.0)


def check_alone(ctx: click.Context, config: str | None, others: Sequence[str]) -> None:
    """Refuse options that a fleet.toml already sets."""
    if config is None:
        return
    for key in others:
        if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE and ctx.params[key]:
            name = "the options after --" if key == "replica_options" else "--" + key.replace("_", "-")
            raise Unusable(f"{name} and --config {config} say it twice; write it into the file")
