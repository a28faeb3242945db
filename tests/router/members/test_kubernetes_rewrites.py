"""InferenceModelRewrites: those of the pool, which rule counts, and requests that get another model by them."""

import logging
from contextlib import AsyncExitStack

import msgspec
import pytest

from router.config import EXTENSION, GROUPS, Kubernetes
from router.members.discovery.cluster import Cluster
from router.members.discovery.rewrites import rewrites_of, rules_of
from router.prompts.model_rewrites import NO_RULES, Rules, Target
from tests.router.kubernetes_api import PODS, POOLS, SPACE, KubernetesApi, Object, pod, pool, port
from tests.router.loopback import until
from tests.router.scripted import CHAT, Scripted, connect, says, served


def rule(*models: str, **targets: int | None) -> Object:
    matches = [{"model": {"value": model}} for model in models]
    weights = {name: {} if weight is None else {"weight": weight} for name, weight in targets.items()}
    named = [{"modelRewrite": name} | weight for name, weight in weights.items()]
    return {"matches": matches, "targets": named}


def rewrite(name: str, *rules: Object, of: str = "llm", created: str = "2026-01-01T00:00:00Z") -> Object:
    reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": of}
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"poolRef": reference, "rules": list(rules)}}


def rules(*objects: Object) -> Rules:
    made = rewrites_of(SPACE, "llm", EXTENSION)
    made.listed([made.page(msgspec.json.encode({"metadata": {"resourceVersion": "5"}, "items": objects}))])
    return rules_of(made.desired().values())


def test_rules_are_those_of_the_pool() -> None:
    found = rules(rewrite("a", rule("chat", "talk", old=9, new=1)), rewrite("b", rule("chat", other=1), of="another"))
    both = (Target("old", 9), Target("new", 1))
    assert found == Rules({"chat": both, "talk": both})
    assert rules({"metadata": {"name": "none"}}) == rules(rewrite("no rules")) == NO_RULES


def test_the_first_rule_of_the_oldest_counts_and_one_for_a_model_before_one_for_all() -> None:
    found = rules(
        rewrite("a", rule("chat", late=1), rule(late=1), created="2026-02-01T00:00:00Z"),
        rewrite("z", rule(rest=1), rule("chat", first=1), rule("chat", second=1), created="2026-01-01T00:00:00Z"),
    )
    assert found == Rules({"chat": (Target("first", 1),)}, (Target("rest", 1),))


def test_without_weights_targets_are_equal() -> None:
    assert rules(rewrite("a", rule("m", x=None, y=None))).targets("m") == (Target("x", 1), Target("y", 1))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (rule("m"), "it names no targets"),
        (rule("m", x=1, y=None), "some of its targets have a weight, and some have none"),
        (rule("m", x=0), "a weight is not between 1 and 1,000,000"),
        (rule("", x=1), "a match is not the value of a model, of type Exact"),
        (rule(x=1) | {"matches": [{"model": {"value": "m", "type": "Prefix"}}]}, "of type Exact"),
        ({"targets": [{"weight": 1}]}, "a target has no modelRewrite"),
    ],
)
def test_a_rule_that_cannot_be_is_ignored_and_the_log_says_why(
    broken: Object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert rules(rewrite("a", broken, rule("other", x=1))) == Rules({"other": (Target("x", 1),)})
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
        api.put(rewrites, rewrite("a", rule("chat", one=1)))
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
        api.put(rewrites, rewrite("a", rule("chat", two=1)))
        await until(lambda: running.router.model_rewrites.targets("chat")[0].model == "two", "the change")
        assert await model_of("chat") == "two"
        api.delete(rewrites, "a")
        await until(lambda: running.router.model_rewrites.is_empty, "the end")
