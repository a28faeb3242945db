"""Engines' figures are read wherever an answer is cut in two, and generated text cannot pretend to have any."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.attempt import Report

CHAT = {"usage": {"prompt_tokens": 1234, "completion_tokens": 56, "prompt_tokens_details": {"cached_tokens": 789}}}
MESSAGES = {"usage": {"input_tokens": 234, "cache_read_input_tokens": 789, "cache_creation_input_tokens": 211}}


@given(st.lists(st.integers(0, 200)), st.sampled_from([0, 1]))
def test_figures_are_found_however_the_answer_is_cut(cuts: list[int], spaces: int) -> None:
    whole = json.dumps({"text": "x" * 30, **CHAT}, separators=(",", ":" + " " * spaces)).encode()
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    report = Report()
    for start, end in pairwise(places):
        report.read(whole[start:end])
    assert (report.prompt, report.cached, report.generated) == (1234, 789, 56)


def test_anthropics_input_tokens_leave_out_the_cache() -> None:
    report = Report()
    report.read(b"event: message_start\ndata: %b\n\n" % json.dumps(MESSAGES).encode())
    report.read(b'event: message_delta\ndata: {"usage":{"input_tokens":234,"output_tokens":9}}\n\n')
    assert (report.prompt, report.cached, report.generated) == (1234, 789, 9)


def test_generated_text_is_not_read() -> None:
    report = Report()
    report.read(json.dumps({"text": json.dumps(CHAT)}).encode())
    assert (report.prompt, report.cached, report.generated) == (None, None, None)
