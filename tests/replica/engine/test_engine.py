"""The engine from submit to output, in virtual time, without sockets."""

import pytest

from events.blocks import block_keys, pack_tokens, root_key
from events.messages import BlockStored
from replica.config import SimulatedConfig
from replica.messages import Refused, Sampling, Submit
from tests.replica.engines import MODEL, SIZE, RememberingRunner, drain, engine, generate, step, submit

PROMPT = list(range(100, 121))  # five blocks and a token


# ---- what a hit saves, and what it does not


def test_a_hit_skips_prefill_and_not_decode() -> None:
    speed = SimulatedConfig(prefill_tokens_per_s=1000, decode_tokens_per_s=10, step_overhead_s=0)
    one = engine(simulated=speed)
    times: list[tuple[float, float]] = []
    answers = []
    for _ in range(2):
        began_s = one.clock.now_s()
        submit(one, 0, PROMPT, 5)
        tokens = step(one)[0].token_ids
        first_s = one.clock.now_s()
        tokens += drain(one)[0]
        answers.append(tokens)
        times.append((first_s - began_s, one.clock.now_s() - first_s))
    (cold_s, decode_s), (warm_s, decode_again_s) = times
    assert cold_s - warm_s == pytest.approx(21 / 1000)  # what is left is one token, computed like a decode
    assert decode_again_s == pytest.approx(decode_s)
    assert answers[0] == answers[1]
    assert one.scheduler.generated_tokens == 10


def test_answers_are_cached_like_prompts_so_the_next_turn_of_a_conversation_hits() -> None:
    one = engine()
    said, _ = generate(one, PROMPT, 8)
    assert generate(one, [*PROMPT, *said, 7])[1] == (len(PROMPT) + 8 - 1) // SIZE * SIZE


@pytest.mark.parametrize("salts", [("a", "b"), (None, "b"), ("a", None)])
def test_another_salt_shares_nothing(salts: tuple[str | None, str | None]) -> None:
    one = engine(runner=RememberingRunner)
    first, second = (generate(one, PROMPT, cache_salt=salt) for salt in salts)
    assert (first[1], second[1]) == (0, 0)
    assert first[0] == second[0]
    assert generate(one, PROMPT, cache_salt=salts[0])[1] == 5 * SIZE


# ---- names before and after prefill


def test_nothing_hits_before_it_is_computed() -> None:
    one = engine(runner=RememberingRunner, max_num_batched_tokens=8)
    submit(one, 1, PROMPT)
    assert one.pool.resident() == set()
    keys = block_keys(PROMPT, SIZE, root_key(MODEL, block_size=SIZE))
    for blocks in (2, 4, 5):
        step(one)
        assert one.pool.resident() == set(keys[:blocks])


# ---- refusals


@pytest.mark.parametrize(("prompt", "output"), [(b"", b""), (b"abc", b""), (b"abcd", b"x")])
def test_a_prompt_that_is_no_list_of_token_ids_is_invalid(prompt: bytes, output: bytes) -> None:
    refused = engine().submit(Submit(1, prompt, Sampling(max_tokens=1), output))
    assert refused is not None
    assert (refused.id, refused.reason) == (1, "invalid")


def test_a_full_queue_says_when_there_should_be_room_again() -> None:
    one = engine(max_waiting=1, max_num_seqs=1, num_blocks=256, simulated=SimulatedConfig(prefill_tokens_per_s=100))
    for first in (0, 10_000, 20_000):  # now the speeds are known
        generate(one, list(range(first, first + 600)), 10)
    submit(one, 1, PROMPT, 200)
    step(one)
    submit(one, 2, list(range(1000, 1100)))
    refused = submit(one, 3, PROMPT)
    assert refused is not None
    assert refused.reason == "full"
    speed = one.speed
    assert refused.retry_after_s == pytest.approx(100 / speed.prefill_tokens_per_s + 199 * speed.step_s)
    assert 1 <= refused.retry_after_s <= 60


@pytest.mark.parametrize(("prompt", "output"), [([5, 300], []), ([5], [6, 300])])
def test_a_token_id_that_the_model_does_not_know_is_refused_with_the_id(prompt: list[int], output: list[int]) -> None:
    one = engine()
    one.runner.vocab_size = 300
    assert submit(one, 1, prompt, output=output) == Refused(
        1, "invalid", "token id 300 is not in the model's vocabulary of 300 tokens"
    )
    assert not one.busy
    assert submit(one, 1, [5, 299]) is None


# ---- cancel and reset


# ---- events


def test_events_carry_lora_and_salt_so_that_a_router_finds_the_same_keys() -> None:
    one = engine()
    generate(one, PROMPT, lora_name="adapter", cache_salt="salt")
    event = one.take_events()[0]
    assert isinstance(event, BlockStored)
    assert event.block_hashes == block_keys(PROMPT, SIZE, root_key(MODEL, "adapter", "salt", SIZE))


# ---- statistics


def test_snapshot_counts_tokens_and_blocks_asked_for_and_found() -> None:
    one = engine()
    generate(one, PROMPT)
    generate(one, PROMPT)
    found = one.pool.snapshot()
    assert (found.query_tokens, found.hit_tokens) == (42, 20)
    assert (found.query_blocks, found.hit_blocks) == (10, 5)
    assert (found.partial_hit_tokens, found.preempted_query_tokens, found.preempted_hit_tokens) == (0, 0, 0)
    assert (found.total, found.free, found.referenced) == (64, 64, 0)
    assert found.cached == found.unreferenced == one.pool.named


def test_load_tells_a_router_what_runs_waits_and_is_queued() -> None:
    one = engine(max_num_seqs=1)
    submit(one, 1, PROMPT)
    submit(one, 2, PROMPT)
    step(one)
    load = one.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (1, 1, 21)
    assert load.free_blocks == 64 - 6


# ---- time


def test_a_priority_is_overtaken_by_what_comes_so_many_seconds_later_and_by_nothing_else() -> None:
    one = engine(max_num_seqs=1)
    for number, priority in ((1, 5.0), (2, 0.0), (3, 0.0)):
        assert submit(one, number, [number], 1, priority=priority) is None
        one.clock.sleep(4.0)
    assert list(drain(one)) == [2, 1, 3]


def test_the_choices_of_one_request_are_all_taken_or_none() -> None:
    one = engine(max_waiting=3, max_num_seqs=1)
    sampling = Sampling(max_tokens=2)
    choices = [Submit(number, pack_tokens(PROMPT), sampling) for number in range(4)]
    submit(one, 9, PROMPT, 1)
    refused = one.submit_all(choices)
    assert refused is not None
    assert (refused.id, refused.reason) == (3, "full")
    assert one.scheduler.requests.keys() == {9}
    one.check()
    assert drain(one).keys() == {9}
    assert one.submit_all(choices) is None
    assert drain(one).keys() == {0, 1, 2, 3}
    assert one.stats().prompt_tokens == 5 * len(PROMPT)
