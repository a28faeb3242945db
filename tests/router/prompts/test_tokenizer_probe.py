from pathlib import Path

import msgspec
import pytest

from api.openai.engine_requests import TokenizeRequest
from api.openai.requests import read
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from router.prompts.tokenizer_probe import Probe, conversations, probes, verdict
from tests.router.families import prompts


def answered(asked: list[Probe], by: Prompts) -> list[tuple[int, bytes]]:
    """As a replica with these prompts answers `POST /tokenize`."""
    tokens = [by.tokenize(read(probe.body, TokenizeRequest)) for probe in asked]
    return [(200, msgspec.json.encode({"count": len(ids), "max_model_len": 1, "tokens": ids})) for ids in tokens]


@pytest.mark.parametrize("family", ["qwen", "llama3", "mistral", "unigram"])
def test_a_replica_with_our_tokenizer_is_verified(tmp_path: Path, family: str) -> None:
    ours = prompts(family, tmp_path)
    asked = probes("m", ours)
    assert len(asked) >= 4, "prompts and conversations"
    assert all(msgspec.json.decode(probe.body)["model"] == "m" for probe in asked)
    assert verdict(asked, answered(asked, ours)).verified is True


def test_another_tokenizer_is_found_out(tmp_path: Path) -> None:
    asked = probes("m", prompts("qwen", tmp_path))
    found = verdict(asked, answered(asked, prompts("gpt2", tmp_path)))
    assert found.verified is False and found.why.startswith("a prompt: token ")


def test_another_template_is_found_out(tmp_path: Path) -> None:
    ours = prompts("qwen", tmp_path)
    asked = probes("m", ours)
    theirs = Prompts(ours.tokenizer, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = verdict(asked, answered(asked, theirs))
    assert found.verified is False and found.why.startswith("1 messages: ")


def test_one_token_more_is_found_out(tmp_path: Path) -> None:
    asked = probes("m", prompts("qwen", tmp_path))
    longer = [(200, msgspec.json.encode({"tokens": [*probe.expected, 1]})) for probe in asked]
    found = verdict(asked, longer)
    assert found.verified is False and "tokens there and" in found.why


@pytest.mark.parametrize(
    "answer",
    [(404, b"{}"), (200, b"\xff"), (200, b'{"tokens": "a"}'), (501, b""), (200, b"")],
)
def test_a_replica_that_does_not_say_is_unverified(tmp_path: Path, answer: tuple[int, bytes]) -> None:
    ours = prompts("qwen", tmp_path)
    asked = probes("m", ours)
    found = verdict(asked, [answer] * len(asked))
    assert found.verified is None and f"answers {answer[0]}" in found.why
    partly = verdict(asked, [*answered(asked, ours)[:-1], answer])
    assert partly.verified is None and "messages" in partly.why


def test_a_model_without_a_template_is_asked_for_prompts_alone() -> None:
    bytes_alone = probes("m", Prompts(ByteTokenizer(), "{{ raise_exception('no') }}"))
    assert [probe.what for probe in bytes_alone] == ["a prompt", "a prompt"]
    assert conversations(Prompts(ByteTokenizer(), "{{ raise_exception('no') }}")) == []
    assert verdict([], []).verified is None
