"""The metrics for Prometheus: the names in docs/metrics.md, and values that add up."""

import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from events.native import Load
from replica.http.metrics import CONSTRAINT_LIMITS, Metrics
from replica.messages import NeighbourSnapshot, PoolSnapshot, Rates, Stats
from tests.events.processes import wait_until
from tests.replica.serving import MODEL, SLOW, Replica, replica

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `((?!warmroute_(?:router|fleet):)\S+)` \| (\w+) \| (.+) \|$", re.MULTILINE)

POOL = PoolSnapshot(query_tokens=100, hit_tokens=40, query_blocks=5, hit_blocks=3, total=10, free=6, referenced=4)


def metrics(stats: Stats | None = None) -> Metrics:
    known = stats or Stats(load=Load(running=2), pool=POOL, rates=Rates(), preemptions=7)
    return Metrics(MODEL, 16, lambda: known)


def families(text: str) -> dict[str, tuple[str, str]]:
    return {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
        for family in text_string_to_metric_families(text)
    }


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and by the values of the labels that are not the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL, sample
            found[sample.name, " ".join(sample.labels.values())] = sample.value
    return found


def test_the_page_lists_exactly_what_is_exposed(served: Replica) -> None:
    exposed = families(served.get("/metrics").body.decode())
    assert {name: (kind, meaning) for name, kind, meaning in ROW.findall(PAGE.read_text())} == exposed


def test_the_answer_is_prometheus_text(served: Replica) -> None:
    answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"_created" not in answer.body


def test_the_engines_numbers_appear_under_current_and_old_names() -> None:
    found = samples(metrics().text().decode())
    assert found["vllm:kv_cache_usage_perc", ""] == found["vllm:gpu_cache_usage_perc", ""] == 0.4
    assert found["vllm:prefix_cache_queries_total", ""] == found["vllm:gpu_prefix_cache_queries_total", ""] == 100
    assert found["vllm:prefix_cache_hits_total", ""] == 40
    assert found["vllm:gpu_prefix_cache_hit_rate", ""] == 0.6
    assert found["vllm:num_requests_running", ""] == 2
    assert found["vllm:num_preemptions_total", ""] == 7
    assert found["vllm:cache_config_info", "16 10"] == 1  # 10 blocks of 16


def test_limits_of_constraints_are_counted_by_the_server_and_by_the_engine() -> None:
    kept = metrics(Stats(load=Load(), pool=PoolSnapshot(), rates=Rates(), constraint_failures=3))
    kept.constraint_limits["time"] += 1
    found = samples(kept.text().decode())
    counts = {limit: found["warmroute:constraint_limits_total", limit] for limit in CONSTRAINT_LIMITS}
    assert counts == {"waiting": 0, "time": 1, "size": 0, "step": 3}


def test_both_directions_between_neighbours_are_counted() -> None:
    pulled = NeighbourSnapshot(blocks=3, bytes=300, seconds=0.5, failures={"closed": 2})
    stats = Stats(load=Load(), pool=PoolSnapshot(), rates=Rates(), neighbours={"pulled": pulled})
    found = samples(metrics(stats).text().decode())
    assert found["warmroute:neighbour_blocks_total", "pulled"] == 3
    assert found["warmroute:neighbour_bytes_total", "pulled"] == 300
    assert found["warmroute:neighbour_seconds_total", "pulled"] == 0.5
    assert found["warmroute:neighbour_failures_total", "pulled closed"] == 2
    assert found["warmroute:neighbour_blocks_total", "read"] == 0


def test_requests_move_the_numbers(served: Replica) -> None:
    def now() -> dict[tuple[str, str], float]:
        return samples(served.get("/metrics").body.decode())

    def grown(name: str, label: str = "") -> float:
        return now()[name, label] - before[name, label]

    served.wait_idle()
    before = now()
    body: dict[str, Any] = {"model": MODEL, "prompt": "x" * 31, "max_tokens": 10, "n": 2, "ignore_eos": True}
    assert served.post("/v1/completions", body).status == 200
    assert grown("vllm:generation_tokens_total") == 20
    assert grown("vllm:request_success_total", "length") == 2
    assert grown("vllm:time_to_first_token_seconds_count") == 2
    assert grown("vllm:inter_token_latency_seconds_count") == 18
    assert grown("vllm:time_per_output_token_seconds_count") == 18
    assert grown("vllm:request_params_n_sum") == 2
    assert grown("vllm:request_params_n_count") == 1
    assert grown("vllm:request_prompt_tokens_sum") == 64  # each choice is a request to the engine
    assert grown("vllm:request_params_max_tokens_count") == 2
    wait_until(lambda: grown("vllm:prefix_cache_queries_total") == 64, "the engine's counters have come")
    assert grown("vllm:prompt_tokens_total") == 64
    assert grown("vllm:prefix_cache_hits_total") >= 16  # the second choice finds the first one's block


def test_refused_requests_are_counted_as_refused_and_as_nothing_else() -> None:
    def now() -> dict[tuple[str, str], float]:
        return samples(served.get("/metrics").body.decode())

    refusals: list[tuple[dict[str, Any], int]] = [
        ({"n": 0}, 400),
        ({"model": "other"}, 404),
        ({"prompt": "x" * 99}, 400),
        ({"n": 2}, 429),
        ({"n": 2, "stream": True}, 429),
    ]
    ask: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    with replica(SLOW, max_num_seqs=1, max_waiting=1, max_model_len=64) as served:
        connection, response = served.open("POST", "/v1/completions", ask | {"max_tokens": 60, "stream": True})
        wait_until(lambda: now()["vllm:prompt_tokens_total", ""], "the engine's counters have come")
        before = now()
        for fields, status in refusals:
            assert served.post("/v1/completions", ask | fields).status == status
        for path, status in [("/tokenize", 400), ("/nowhere", 404)]:
            assert served.post(path, b"{").status == status
        after = now()
        response.close()
        connection.close()
    grown = {key: after[key] - before[key] for key in after if after[key] != before[key]}
    refused = {label: value for (name, label), value in grown.items() if name == "warmroute:requests_refused_total"}
    assert refused == {"invalid": 2, "too_long": 1, "full": 2}
    assert not [key for key in grown if key[0].startswith(("vllm:request", "vllm:prompt", "vllm:time_to"))], grown
