"""Usage and limits of whole routers: exact to the token, over workers, and after kill -9."""

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from router.responses import CAUSES
from tests.chaos.replicas import Command, wait_gone
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import children
from tests.replica.serving import MODEL

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

FAST = (
    *("--engine", "simulated", "--served-model-name", MODEL, "--model", "demo", "--set=simulated_step_overhead=0"),
    *("--set=simulated_prefill_tokens_per_s=1e6", "--set=simulated_decode_tokens_per_s=5000"),
)
KEYS = """
[keys.alice]
key = "alice"
[keys.bob]
key = "bob"
tokens_per_day = 100_000
requests_per_day = 100_000
[keys.root]
key = "root"
admin = true
[keys.poor]
key = "poor"
tokens_per_day = 400
cached_token_weight = 1
[keys.few]
key = "few"
requests_per_day = 12
"""
LONG = "A beginning that all prompts of this test have in common, and that fills some blocks of the cache. " * 4


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *FAST) as made:
        yield made


class Files:
    def __init__(self, folder: Path) -> None:
        self.keys, self.db, self.log = folder / "keys.toml", folder / "usage.db", folder / "access.log"
        self.keys.write_text(KEYS)

    @property
    def options(self) -> tuple[object, ...]:
        return "--api-keys", self.keys, "--usage-db", self.db, "--access-log", self.log

    def logged(self) -> dict[str, Counter[str]]:
        """The sums of the access log, by key."""
        sums: dict[str, Counter[str]] = {}
        for line in map(json.loads, self.log.read_text().splitlines()):
            if "model" in line:
                one = sums.setdefault(line["key"], Counter())
                cached = line.get("cached_tokens", 0)
                one["requests"] += 1
                one["computed_tokens"] += line["prompt_tokens"] - cached
                one["cached_tokens"] += cached
                one["generated_tokens"] += line.get("output_tokens", 0)
        return sums

    def saved(self) -> dict[str, Counter[str]]:
        """The sums of the file, by key; nothing while it is being made."""
        with closing(sqlite3.connect(self.db)) as file, suppress(sqlite3.OperationalError):
            file.row_factory = sqlite3.Row
            return sums_of([dict(row) for row in file.execute("SELECT * FROM usage")])
        return {}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def sums_of(rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        one = sums.setdefault(row["key"], Counter())
        for name in ("requests", "computed_tokens", "cached_tokens", "generated_tokens"):
            one[name] += row[name]
    return sums


def bearing(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def ask(served: RouterProcess, key: str, prompt: str = LONG, tokens: int = 5, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
    return served.post("/v1/completions", body, **bearing(key))


def use(served: RouterProcess, count: int) -> None:
    """Send requests of several kinds, by two keys."""
    for number in range(count):
        key = ("alice", "bob")[number % 2]
        answer = ask(served, key, f"{LONG}{number % 3}", tokens=1 + number % 7, stream=number % 4 == 0)
        assert answer.status == 200, answer


def told(served: RouterProcess) -> dict[str, Counter[str]]:
    answer = served.ask("GET", "/usage", headers=bearing("root"))
    assert answer.status == 200, answer
    return sums_of(answer.json["usage"])


def test_usage_is_the_sum_of_the_access_log_to_the_token(replicas: Fleet, files: Files) -> None:
    with router(*replicas.as_options, *files.options, "--workers", 2) as served:
        use(served, 24)
        wait_until(lambda: requests_of(files.logged()) == 24, "all are logged")
        logged = files.logged()
        for _ in range(6):  # whichever worker answers
            assert told(served) == logged
        assert logged["alice"]["cached_tokens"] > 0 and logged["bob"]["generated_tokens"] > 0
        assert files.saved() == logged


def test_after_kill_9_what_was_saved_is_there_and_more_is_added(replicas: Fleet, files: Files) -> None:
    with router(*replicas.as_options, *files.options) as served:
        use(served, 10)
        wait_until(lambda: files.saved() == files.logged(), "it is saved, within a second")
        before = files.logged()
        use(served, 4)
        kill(served)
    after = files.saved()
    for key, counts in before.items():
        assert all(after[key][name] >= count for name, count in counts.items())
    logged = files.logged()  # an answer may be older than its line: the last one may be missing
    with router(*replicas.as_options, *files.options) as served:
        use(served, 2)

        def expected() -> dict[str, Counter[str]]:
            return {key: after[key] + (counts - logged[key]) for key, counts in files.logged().items()}

        wait_until(lambda: files.logged() != logged and told(served) == expected(), "it is counted")
        assert requests_of(told(served)) == requests_of(after) + 2


def requests_of(sums: dict[str, Counter[str]]) -> int:
    return sum(one["requests"] for one in sums.values())


def client(served: RouterProcess, key: str) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def kill(served: RouterProcess) -> None:
    workers = children(served.process.pid)
    served.process.kill()
    served.process.wait(DEADLINE_S)
    wait_gone(*workers)


def left(answer: Any) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_the_days_budget_holds_over_workers_and_after_kill_9(replicas: Fleet, files: Files) -> None:
    options = (*replicas.as_options, *files.options, "--workers", 2)
    with router(*options) as served:
        remaining = 400
        for number in range(3):  # each by a connection of its own
            answer = ask(served, "poor", "x" * 99, tokens=20)
            remaining -= 1 + 99 + 20
            assert (answer.status, left(answer)) == (200, remaining), number
        with client(served, "poor") as poor, pytest.raises(openai.RateLimitError) as caught:
            poor.completions.create(model=MODEL, prompt="y" * 99)
        assert (caught.value.code, caught.value.param) == ("rate_limit_exceeded", "tokens_per_day")
        assert "tokens a day (UTC) (tokens_per_day); 360 of 400 are used" in caught.value.message
        assert int(caught.value.response.headers["retry-after"]) > 0

        def budget() -> Any:
            with closing(sqlite3.connect(files.db)) as file:
                return file.execute("SELECT computed + cached + generated FROM budgets WHERE key = 'poor'").fetchall()

        wait_until(lambda: budget() == [(360,)], "it is saved, within a second")
        kill(served)
    with router(*options) as served:
        answer = ask(served, "poor", "x" * 9, tokens=10)
        assert (answer.status, left(answer)) == (200, 20)
        assert ask(served, "poor", "x" * 99).status == 429


# ---- why it was computed


def counted(source: RouterProcess | Command, name: str, **labels: str) -> Counter[str]:
    """The values of a counter, by cause."""
    found = Counter[str]()
    for family in text_string_to_metric_families(source.get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[sample.labels.get("cause", "")] += int(sample.value)
    return found


def test_what_engines_compute_is_counted_by_its_cause_to_the_token() -> None:
    with fleet(2, *FAST, "--num-blocks", 64) as small, router(*small.as_options, "--policy", "round-robin") as served:
        expected, wanted = {"r0": Counter[str](), "r1": Counter[str]()}, "a" * 400

        def use(prompt: str, cause: str, **more: Any) -> None:
            answer = ask(served, "", prompt, **more)
            usage = answer.json["usage"]
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            rest = 0 if cause == "unknown" else usage["prompt_tokens"] - (usage["prompt_tokens"] - 1) // 16 * 16
            expected[answer.headers["x-warmroute-replica"]] += Counter({cause: computed - rest}) + Counter(new=rest)

        def is_evicted() -> bool:
            seen = served.post("/explain?api=completions", {"model": MODEL, "prompt": wanted}).json
            return not any(one["matched_tokens"] for one in seen["candidates"])

        def has_computed(replica: Command, tokens: int) -> bool:
            return counted(replica, "warmroute:computed_prompt_tokens_total").total() == tokens

        use(wanted, "new")
        use(wanted, "elsewhere")
        for filler in "bcde":
            use(filler * 600, "new")
        wait_until(is_evicted, "the router knows it")
        use(wanted, "evicted")
        use("f" * 100, "unknown", prompt_logprobs=1)
        for number, replica in enumerate(small.replicas):
            name = f"r{number}"
            told = counted(served, "warmroute_router:prefill_tokens_total", replica=name)
            assert +told == +expected[name]
            wait_until(partial(has_computed, replica, told.total()), "its engine reports the same")
        assert {f"{cause}_tokens" for counts in expected.values() for cause in +counts} == {*CAUSES}
