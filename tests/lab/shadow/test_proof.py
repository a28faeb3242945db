"""The certificate: its verdict in words, and its text."""

import asyncio
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from lab.commands.prove import prove
from lab.shadow.proof import Certificate, judge, lines
from tests.router.scripted import named, served

FOUND = Certificate(
    url="http://r:1",
    seconds=10.0,
    requests=11,
    failed=1,
    skipped={},
    trees=2,
    doubts={},
    answers={"same": 9, "moved": 1},
    predictions={"all": 10, "exact": 8, "right": 7, "wrong": 0},
    tokens={"tokens": 2000, "told": 800, "held": 800, "best": 1000, "pooled": 1200, "elsewhere": 200, "evicted": 100},
    counted_tokens=2000,
    counted_hits=800,
    prefill_tokens_per_s=100.0,
    assumed=(),
    regret_s={"elsewhere": 2.0, "evicted": 1.0},
)


@pytest.mark.parametrize(
    ("changed", "verdict", "says"),
    [
        ({}, "proved", "10 of 10 answers told what the engines' events say, and no prediction called exact was wrong"),
        ({"answers": {"same": 9, "different": 1}}, "refuted", "1 of 10 answers contradict the engines' events"),
        ({"predictions": FOUND.predictions | {"wrong": 1}}, "refuted", "1 of 8 predictions called exact were wrong"),
        ({"counted_hits": 816}, "refuted", "the answers told 800 cached tokens, and the engines counted 816"),
        ({"counted_hits": 816, "counted_tokens": 2016}, "proved", "10 of 10"),  # somebody else has asked, too
        ({"doubts": {"r1": "its events are not followed"}}, "unknown", "10 of 10"),
        ({"answers": {"same": 8}}, "unknown", "8 of 10"),  # two were not placed, or nobody knows where they went
        ({"answers": {}, "requests": 0, "failed": 0}, "unknown", "0 of 0"),
    ],
)
def test_a_verdict_follows_from_the_certificate(changed: dict[str, Any], verdict: str, says: str) -> None:
    found = replace(FOUND, **changed)
    judge(found)
    assert found.verdict == verdict and found.says.startswith(says)


def test_the_text_has_every_figure() -> None:
    found = replace(FOUND, skipped={"late": 2}, doubts={"r1": "a gap"}, assumed=("8,000 prefill tokens/s",))
    judge(found)
    text = "\n".join(lines(found))
    for expected in (
        "http://r:1: 11 requests in 10.0 s, 1 failed, 2 not placed",
        "trees: 1 of 2 exact\n  r1: a gap",
        "told by the answers                   800     40.0%",
        "in one pooled cache then            1,200     60.0%",
        "answers: 9 as the events say, 1 changed on the way",
        "predictions: 10 told, 8 called exact: 7 right, 1 changed on the way, 0 wrong",
        "computed though another replica had them: 200 tokens, 2.0 s of GPU time",
        "prefill: 100 tokens/s; assumed: 8,000 prefill tokens/s",
        "unknown: 10 of 10 answers",
    ):
        assert expected in text


async def test_a_model_without_a_tokenizer_is_refused_with_what_to_give() -> None:
    async with served(named("a")) as running:
        command = [f"127.0.0.1:{running.port}", "--replica", running.replicas["a"].spec.url]
        done = await asyncio.to_thread(CliRunner().invoke, prove, command)
    assert done.exit_code == 2
    assert "m: it has no tokenizer here; give its folder: --model-dir m=DIR" in done.output
