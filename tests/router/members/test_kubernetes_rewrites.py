"""InferenceModelRewrites: those of the pool, which rule counts, and requests that get another model by them."""

import logging
from contextlib import AsyncExitStack

import msgspec
import pytest

from router.config import EXTENSION, GROUPS, Kubernetes
from router.members.discovery.collection import Cluster
from router.members.discovery.pool import rewrites_of, rules_of
from router.prompts.model_rewrites import NO_RULES, Rules
from tests.router.kubernetes_api import PODS, POOLS, SPACE, KubernetesApi, Object, pod, pool, port
from tests.router.loopback import until
from tests.router.scripted import CHAT, Scripted, connect, says, served


def rule(*models: str, to: str) -> Object:
    matches = [{"model": {"value": model}} for model in models]
    return {"matches": matches, "targets": [{"modelRewrite": to, "weight": 1}]}


def rewrite(name: str, *rules: Object, of: str = "llm", created: str = "2026-01-01T00:00:00Z") -> Object:
    reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": of}
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"poolRef": reference, "rules": list(rules)}}


def rules(*objects: Object) -> Rules:
    made = rewrites_of(SPACE, "llm", EXTENSION)
    made.listed([made.page(msgspec.json.encode({"metadata": {"resourceVersion": "5"}, "items": objects}))])
    return rules_of(made.desired().values())


def test_rules_are_those_of_the_pool() -> None:
    found = rules(rewrite("a", rule("chat", "talk", to="old")), rewrite("b", rule("chat", to="other"), of="another"))
    assert found == Rules({"chat": "old", "talk": "old"})
    assert rules({"metadata": {"name": "none"}}) == rules(rewrite("no rules")) == NO_RULES


def test_the_first_rule_of_the_oldest_counts_and_one_for_a_model_before_one_for_all() -> None:
    found = rules(
        rewrite("a", rule("chat", to="late"), rule(to="late"), created="2026-02-01T00:00:00Z"),
        rewrite(
            "z", rule(to="rest"), rule("chat", to="first"), rule("chat", to="second"), created="2026-01-01T00:00:00Z"
        ),
    )
    assert found == Rules({"chat": "first"}, "rest")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"targets": []}, "it names 0 targets"),
        ({"targets": [{"modelRewrite": "x"}, {"modelRewrite": "y"}]}, "it names 2 targets; a rule has one"),
        (rule("", to="x"), "a match is not the value of a model, of type Exact"),
        (rule(to="x") | {"matches": [{"model": {"value": "m", "type": "Prefix"}}]}, "of type Exact"),
        ({"targets": [{"weight": 1}]}, "its target has no modelRewrite"),
    ],
)
def test_a_rule_that_cannot_be_is_ignored_and_the_log_says_why(
    broken: Object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert rules(rewrite("a", broken, rule("other", to="x"))) == Rules({"other": "x"})
    assert f"the InferenceModelRewrite a has a rule that is ignored, number 1: {said}"[:60] in caplog.text
    assert said in caplog.text


@pytest.mark.parametrize("group", GROUPS)
async def test_requests_get_the_model_of_the_rule_that_counts_now(group: str) -> None:
    rewrites = f"/apis/{group}/v1alpha2/namespaces/{SPACE}/inferencemodelrewrites"
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(Scripted("a", says(), models=["one", "two"]).running())
        api = await stack.enter_async_context(KubernetesApi().running())
        api.put(POOLS, pool("llm", ports=[replica.port]))
        own: Object = {"ports": [port("http", replica.port)], "annotations": {"warmroute/engine": "openai"}}
        api.put(PODS, pod("a", "127.0.0.1", **own))
        api.put(rewrites, rewrite("a", rule("chat", to="one")))
        api.refusals.append(lambda request: (403, {}) if request.path == rewrites else None)
        told = Kubernetes(Cluster(api.url, SPACE), pool="llm", rewrites=True, group=group)
        running = await stack.enter_async_context(served(ready=False, kubernetes=told))
        client = await stack.enter_async_context(connect(running.port))
        members = running.router.members.by_name
        await until(lambda: "a" in members and members["a"].candidate.unavailable is None, "the replica")

        async def model_of(asked: str) -> str:
            await client.post(CHAT, {"model": asked, "messages": [{"role": "user", "content": "hi"}]})
            model: str = replica.calls[-1].json["model"]
            return model

        ready = await client.get("/ready")
        assert (ready.status, ready.error["message"]) == (503, "the model rewrites have not been read yet")
        api.refusals.clear()
        await until(lambda: not running.router.model_rewrites.is_empty, "the rule")
        assert (await client.get("/ready")).status == 200
        assert [await model_of("chat"), await model_of("two")] == ["one", "two"]
        api.put(rewrites, rewrite("a", rule("chat", to="two")))
        await until(lambda: running.router.model_rewrites.target("chat") == "two", "the change")
        assert await model_of("chat") == "two"
        api.delete(rewrites, "a")
        await until(lambda: running.router.model_rewrites.is_empty, "the end")
