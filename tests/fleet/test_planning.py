"""Command lines as a plan and as the router's configuration."""

from pathlib import Path

import pytest

from fleet.plan import FleetPlan, ModelPlan
from fleet.up.planning import complete, drain_timeout_s, one_model, router_config, with_kv_secrets


def planned(*options: str, model: str = "demo", engine: str = "simulated") -> FleetPlan:
    return one_model(model, engine, 2, "cost", options)


def test_the_limit_of_the_drain_is_that_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drain_timeout_s(planned("--drain-timeout", "600")) == 600
    monkeypatch.setenv("WARMROUTE_DRAIN_TIMEOUT", "90")
    plan = planned()
    assert drain_timeout_s(plan) == 90
    assert plan.models[0].environment == {"WARMROUTE_DRAIN_TIMEOUT": "90"}  # for replicas on other machines


def test_what_the_fleet_says_itself_is_not_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "EVENTS_PORT", "REPLICA_NAME", "MODEL", "ENGINE"):
        monkeypatch.setenv(f"WARMROUTE_{name}", "1")
    assert planned().models[0].environment == {}


def test_replicas_are_told_where_the_model_was_found(demo_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE_DIR", str(demo_cache))
    [plan] = planned(engine="native").models
    assert (plan.name, plan.engine) == ("demo", "native")
    assert Path(plan.model).is_dir()
    assert plan.tokenizer is not None


def test_the_router_has_the_tokenizer_and_the_key_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_API_KEY", "secret")
    plan = FleetPlan(
        models=(ModelPlan(name="a", model="x", tokenizer="/a"), ModelPlan(name="b", model="y")),
        router=("--policy", "prefix", "--replica-limit=7"),
    )
    config = router_config(plan, "127.0.0.1", 0)
    assert (config.policy, config.replica_limit, config.registry) == ("prefix", 7, None)
    assert config.model_dirs == {"a": "/a"}
    assert config.replica_api_key == "secret"
    assert config.demand_key


def test_a_plan_from_a_file_learns_where_its_models_lie(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE_DIR", str(demo_cache))
    ours = ModelPlan(name="small", model="demo")
    theirs = ModelPlan(name="big", model=str(tmp_path), engine="vllm")
    plan = complete(FleetPlan(models=(ours, theirs)))
    assert Path(plan.models[0].model).is_dir()
    assert plan.models[1].tokenizer == str(tmp_path)
    assert plan.models[1].model == str(tmp_path)


def test_replicas_on_other_machines_are_told_the_key_that_they_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", "secret")
    guarded = ModelPlan(name="big", model="x", engine="vllm", api_key_env="BIG_KEY")
    [plan] = complete(FleetPlan(models=(guarded,))).models
    assert plan.environment == {"BIG_KEY": "secret"}


def test_replicas_are_not_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_REPLICA", "http://127.0.0.1:1")
    monkeypatch.setenv("WARMROUTE_MODEL_DIR", "nowhere")
    monkeypatch.setenv("WARMROUTE_QUEUE_SIZE", "7")
    config = router_config(FleetPlan(models=()), "127.0.0.1", 0)
    assert (config.replicas, config.model_dirs, config.queue_size) == ((), {}, 7)


def test_native_replicas_of_a_model_share_a_random_secret_unless_they_are_given_one() -> None:
    given = {"WARMROUTE_KV_SECRET": "one of my own"}
    models = (
        ModelPlan(name="a", model="demo"),
        ModelPlan(name="b", model="demo"),
        ModelPlan(name="c", model="demo", environment=given),
        ModelPlan(name="d", model="demo", engine="vllm"),
        ModelPlan(name="e", model="demo", engine="simulated"),
    )
    a, b, c, d, e = (model.environment for model in with_kv_secrets(FleetPlan(models=models)).models)
    assert len(a["WARMROUTE_KV_SECRET"]) > 40 and a != b
    assert (c, d, e) == (given, {}, {})


def test_groups_of_replicas_that_serve_one_name_share_secret_and_tokenizer() -> None:
    models = (
        ModelPlan(name="qwen", model="demo", role="decode"),
        ModelPlan(name="qwen-prefill", model="demo", serves="qwen", role="prefill", tokenizer="/t"),
    )
    plan = FleetPlan(models=models)
    one, other = (model.environment for model in with_kv_secrets(plan).models)
    assert one == other and one
    assert router_config(plan, "127.0.0.1", 0).model_dirs == {"qwen": "/t"}
