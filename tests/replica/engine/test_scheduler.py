"""The scheduler: the work of each step, preemptions and refusals."""

from typing import Any

import pytest
from msgspec.structs import replace

from kernels.spans import Copy
from replica.cache.block_pool import BlockPool
from replica.config import EngineConfig
from replica.engine.scheduler import Batch, Scheduler, TooLong
from replica.messages import Output, Sampling
from replica.runners.request import Request, Scheduled
from replica.runners.runner import SampledToken
from tests.replica.engines import SIZE, chain

STOP = 99


def scheduler(num_blocks: int = 64, **limits: int) -> Scheduler:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256}
    config = replace(EngineConfig(model="m"), **{**defaults, **limits})
    return Scheduler(BlockPool(num_blocks, SIZE), config)


def submit(
    to: Scheduler, number: int, prompt: int | list[int], max_tokens: int = 8, *, priority: float = 0.0, **sampling: Any
) -> Request:
    """A prompt given as a length has tokens that no other request has."""
    tokens = [1000 * number + at for at in range(prompt)] if isinstance(prompt, int) else prompt
    own = Sampling(max_tokens=max_tokens, **sampling)
    request = Request(number, chain(tokens), len(tokens), own, (priority, number))
    to.submit(request)
    return request


def step(of: Scheduler, token: int = 7) -> tuple[list[tuple[int, int]], list[Output]]:
    """Run one step; return the tokens computed for each request, and the outputs."""
    batch = of.schedule()
    of.check()
    assert sum(scheduled.tokens for scheduled in batch) <= of.limits.max_num_batched_tokens
    outputs = of.commit(batch, drawn(batch, token))
    of.check()
    return [(scheduled.request.id, scheduled.tokens) for scheduled in batch], outputs


def drawn(batch: Batch, token: int = 7) -> list[SampledToken | None]:
    return [SampledToken(token) if scheduled.samples else None for scheduled in batch]


def computed(of: Scheduler) -> list[tuple[int, int]]:
    return step(of)[0]


def finish(of: Scheduler, limit: int = 1000) -> list[int]:
    """Step until all have finished; returns their numbers in the order they did."""
    finished: list[int] = []
    for _ in range(limit):
        if not of.requests:
            return finished
        finished += [output.id for output in step(of)[1] if output.finish_reason]
    raise AssertionError(f"{list(of.requests)} did not finish in {limit} steps")


# ---- one queue and a budget


def test_chunks_of_a_long_prompt_are_mixed_with_the_decodes_of_others() -> None:
    one = scheduler()
    submit(one, 1, 4)
    submit(one, 2, 4)
    assert computed(one) == [(1, 4), (2, 4)]
    submit(one, 3, 70)
    assert [computed(one) for _ in range(4)] == [[(1, 1), (2, 1), (3, count)] for count in (30, 30, 10, 1)]


def test_a_budget_that_some_would_starve_under_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 4; it must be at least max_num_seqs, 8"):
        scheduler(max_num_batched_tokens=4)


# ---- whose turn it is


def test_a_lower_priority_number_goes_first_and_arrival_breaks_ties() -> None:
    one = scheduler(max_num_seqs=1)
    for number, priority in ((1, 5.0), (2, 1.0), (3, 5.0), (4, 1.0)):
        submit(one, number, 2, max_tokens=1, priority=priority)
    assert finish(one) == [2, 4, 1, 3]


def test_what_runs_already_is_not_pushed_out_by_a_better_priority_while_there_is_room() -> None:
    one = scheduler()
    submit(one, 1, 2, priority=5.0)
    step(one)
    submit(one, 2, 2, priority=1.0)
    assert computed(one) == [(1, 1), (2, 2)]
    assert computed(one) == [(2, 1), (1, 1)]


def test_a_better_priority_is_computed_before_the_rest_of_a_long_prompt() -> None:
    one = scheduler(max_num_batched_tokens=8)
    submit(one, 1, 24, priority=5.0)
    assert computed(one) == [(1, 8)]
    submit(one, 2, 6, max_tokens=1, priority=1.0)
    assert computed(one) == [(2, 6), (1, 2)]
    assert computed(one) == [(1, 8)]


def test_a_better_priority_does_not_compute_again_what_a_prompt_under_way_computes() -> None:
    one = scheduler(max_num_batched_tokens=8)
    submit(one, 1, [*range(24)], priority=5.0)
    step(one)
    second = submit(one, 2, [*range(24), 1, 2], priority=1.0)
    while not second.generated:
        step(one)
    assert second.cached_tokens == 24


def test_a_waiting_request_lends_its_place_to_the_prompt_it_needs() -> None:
    one = scheduler(max_num_batched_tokens=8)
    submit(one, 1, [*range(24)], priority=9.0)
    step(one)
    submit(one, 2, [*range(24), 1, 2], max_tokens=1, priority=1.0)
    for number in (3, 4, 5):
        submit(one, number, 8, max_tokens=1, priority=5.0)
    assert [computed(one), computed(one)] == [[(1, 8)], [(1, 8)]]
    assert finish(one)[:2] == [2, 3]


def test_however_many_wait_for_a_prompt_one_of_better_priority_goes_before_them() -> None:
    one = scheduler(max_num_batched_tokens=8, max_waiting=200)
    submit(one, 1, [*range(40)], priority=9.0)
    step(one)
    for number in range(10, 110):
        submit(one, number, [*range(40), number, 1], max_tokens=1, priority=5.0)
    submit(one, 2, 4, max_tokens=1, priority=1.0)
    assert computed(one) == [(2, 4), (1, 4)]


def test_a_better_priority_without_room_delays_no_running_request() -> None:
    one = scheduler(num_blocks=8, max_num_batched_tokens=8)
    submit(one, 1, 24, max_tokens=1, priority=5.0)
    step(one)
    submit(one, 2, 16, max_tokens=1, priority=1.0)
    submit(one, 3, 2, max_tokens=1, priority=2.0)
    assert [computed(one), computed(one)] == [[(1, 8)], [(1, 8)]]
    assert computed(one) == [(2, 8)]


def test_a_request_that_waits_for_blocks_is_not_overtaken_by_a_smaller_one() -> None:
    one = scheduler(num_blocks=5)
    submit(one, 1, 12, max_tokens=4)
    step(one)
    submit(one, 2, 8, max_tokens=1)
    submit(one, 3, 2, max_tokens=1)  # there would be a block for it
    assert computed(one) == [(1, 1)]
    assert one.pool.free == 1
    assert finish(one) == [1, 2, 3]


# ---- refusals


def test_a_long_prompt_that_goes_first_does_not_stall_answers() -> None:
    one = scheduler(max_num_batched_tokens=8)
    answering = submit(one, 1, 4, max_tokens=9, priority=5.0)
    step(one)
    submit(one, 2, 40, priority=1.0)
    for _ in range(4):
        before = answering.generated
        step(one)
        assert answering.generated == before + 1


def test_clients_that_leave_while_waiting_are_forgotten() -> None:
    one = scheduler(max_num_seqs=1, max_waiting=3)
    submit(one, 1, 2, max_tokens=30)
    step(one)
    for number in range(2, 2000):
        submit(one, number, 2)
        assert one.cancel(number)
    assert one.waiting == 0
    assert len(one._waiting) < 100
    one.check()


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    one = scheduler(num_blocks=4)
    with pytest.raises(TooLong, match=r"10 prompt tokens and up to 7 generated .* 16 tokens \(4 blocks of 4\)"):
        submit(one, 1, 10, max_tokens=7)
    assert one.requests == {}
    submit(one, 1, 10, max_tokens=6)
    assert finish(one) == [1]


@pytest.mark.parametrize("blocks", [4, 64])
def test_resumed_output_beyond_its_own_limit_ends_or_is_refused_but_never_hangs(blocks: int) -> None:
    one = scheduler(num_blocks=blocks)
    tokens = list(range(30))
    request = Request(1, chain(tokens), 4, Sampling(max_tokens=2), (0.0, 1))
    if blocks == 4:
        with pytest.raises(TooLong):
            one.submit(request)
    else:
        one.submit(request)
        assert finish(one, limit=3) == [1]


# ---- how it ends


def test_a_stop_token_before_min_tokens_is_output_like_any_other() -> None:
    one = scheduler()
    submit(one, 1, 2, min_tokens=3, stop_token_ids=(STOP,))
    reasons = [step(one, STOP)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, "stop"]


# ---- a prefix that nobody has yet is computed once


def test_two_waiting_requests_with_one_prefix_compute_it_once() -> None:
    one = scheduler()
    shared = list(range(20))
    submit(one, 1, [*shared, 100])
    second = submit(one, 2, [*shared, 200])
    assert computed(one) == [(1, 21)]  # the second could run, and waits
    assert computed(one) == [(1, 1), (2, 1)]
    assert second.cached_tokens == 20
    assert one.computed_prompt_tokens == 22


def test_a_wait_for_a_shared_prefix_delays_no_other_request() -> None:
    one = scheduler(max_num_batched_tokens=64)
    shared = list(range(20))
    submit(one, 1, [*shared, 100])
    submit(one, 2, [*shared, 200])
    submit(one, 3, 5)
    assert computed(one) == [(1, 21), (3, 5)]
    assert computed(one) == [(1, 1), (3, 1), (2, 1)]


def test_without_caching_no_request_waits_for_a_shared_prefix() -> None:
    one = Scheduler(
        BlockPool(64, SIZE, caching=False), EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64)
    )
    submit(one, 1, list(range(20)))
    submit(one, 2, list(range(20)))
    assert computed(one) == [(1, 20), (2, 20)]


def test_no_request_waits_for_a_prefix_with_a_colliding_name() -> None:
    """A chain that may not be named any further would be waited for in vain."""
    one = scheduler(max_num_batched_tokens=64)
    shared = [5] * 20
    squatter = submit(one, 1, [3] * 20, max_tokens=50)
    squatter.chain.keys[:] = chain(shared).keys
    step(one)
    submit(one, 2, [*shared, 1], max_tokens=50)
    step(one)
    third = submit(one, 3, [*shared, 2])
    assert (3, 21) in computed(one)
    assert third.cached_tokens == 0


# ---- reuse of parts


def partial_scheduler(**limits: int) -> Scheduler:
    one = scheduler(**limits)
    one.pool = BlockPool(one.pool.num_blocks, SIZE, partial=True)
    return one


def admitted(of: Scheduler) -> Scheduled:
    """The last of the batch, which is then committed."""
    batch = of.schedule()
    of.commit(batch, drawn(batch))
    of.check()
    return batch[-1]


def test_a_fork_inside_a_block_copies_what_is_shared_and_computes_the_rest() -> None:
    one = partial_scheduler()
    first = submit(one, 1, [*range(10), 100, 101])
    step(one)
    source = first.blocks[2]
    second = submit(one, 2, [*range(10), 200, 201])
    scheduled = admitted(one)
    assert scheduled == Scheduled(second, 10, 2, Copy(source, second.blocks[2], 2))
    assert (second.cached_tokens, one.computed_prompt_tokens) == (10, 14)
    assert (one.pool.lookups.hit_tokens, one.pool.lookups.partial_hit_tokens) == (8, 2)


def test_of_a_prompt_that_is_all_cached_one_token_is_computed() -> None:
    one = partial_scheduler()
    for number in (1, 2):
        submit(one, number, list(range(12)), max_tokens=1)
        finish(one)
    assert one.computed_prompt_tokens == 12 + 1


def test_the_next_turn_continues_in_the_block_where_the_last_one_ended() -> None:
    one = partial_scheduler()
    submit(one, 1, list(range(5)), max_tokens=3)
    finish(one)
    request = submit(one, 2, [*range(5), 7, 7, 7, 50])  # the last token of the answer has no KV yet
    scheduled = admitted(one)
    assert (scheduled.start, scheduled.tokens, scheduled.copy) == (7, 2, None)
    assert request.cached_tokens == 7


def test_two_that_continue_from_one_tail_do_not_write_on_it_both() -> None:
    one = partial_scheduler()
    submit(one, 1, list(range(6)), max_tokens=1)
    finish(one)
    second, third = (submit(one, number, [*range(6), 50 + number]) for number in (2, 3))
    batch = one.schedule()
    assert [(scheduled.start, scheduled.copy) for scheduled in batch] == [
        (6, None),
        (6, Copy(second.blocks[1], third.blocks[1], 2)),
    ]


def test_forks_that_arrive_together_share_whole_blocks_and_the_part_after_them() -> None:
    one = partial_scheduler(max_num_batched_tokens=64)
    for number in range(4):
        submit(one, number, [*range(18), 100 + number, 200])
    assert computed(one) == [(0, 20)]
    assert computed(one) == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assert one.computed_prompt_tokens == 20 + 3 * 2


def test_less_than_a_block_is_not_worth_waiting_a_step() -> None:
    one = partial_scheduler(max_num_batched_tokens=64)
    submit(one, 1, list(range(SIZE)))
    submit(one, 2, list(range(SIZE)))
    assert computed(one) == [(1, SIZE), (2, SIZE)]


def test_what_is_copied_may_be_handed_out_in_the_same_step() -> None:
    one = partial_scheduler(num_blocks=3)
    submit(one, 1, list(range(8)), max_tokens=1)
    finish(one)
    request = submit(one, 2, [0, 1, *range(50, 58)], max_tokens=2)
    scheduled = admitted(one)
    assert scheduled.copy is not None
    assert scheduled.copy.source in request.blocks
    assert (scheduled.copy.target, scheduled.copy.tokens) == (request.blocks[0], 2)


# ---- log probabilities of the prompt


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_as_a_whole_and_kept() -> None:
    one = partial_scheduler(max_num_batched_tokens=64)
    tokens = list(range(10))
    submit(one, 1, tokens, max_tokens=1)
    finish(one)
    submit(one, 2, tokens, prompt_logprobs=0)
    submit(one, 3, tokens, prompt_logprobs=0)
    assert computed(one) == [(2, 10), (3, 10)]  # it does not wait for another's either
    assert one.pool.lookups.query_tokens == 10
    one.pool.reset()
    assert submit(one, 4, tokens, max_tokens=1).uncached_tokens == 2


# ---- preemption


def crowd(num_blocks: int = 4) -> tuple[Scheduler, Request, Request]:
    """Two requests that fit on arrival, but not after they grow."""
    one = scheduler(num_blocks=num_blocks)
    return one, submit(one, 1, 7, max_tokens=6), submit(one, 2, 7, max_tokens=6)


def test_when_blocks_run_out_the_last_in_order_gives_its_own_back() -> None:
    one, first, second = crowd()
    step(one)
    step(one)
    assert computed(one) == [(1, 1)]
    assert one.preemptions == second.preemptions == 1
    assert first.preemptions == 0
    assert (second.blocks, second.computed, one.waiting) == ([], 0, 1)
    assert finish(one) == [1, 2]
    assert one.generated_tokens == 12


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    one, _, second = crowd(num_blocks=5)
    while not one.preemptions:
        step(one)
    assert second.generated > 0
    finish(one)
    assert one.pool.lookups.preempted_hit_tokens > 0
    assert second.cached_tokens == 0  # it says what the first admission found


def test_no_request_is_admitted_in_a_step_that_preempted_another() -> None:
    one = scheduler(num_blocks=4, max_num_seqs=2)
    submit(one, 1, 7, max_tokens=6)
    submit(one, 2, 7, max_tokens=6)
    step(one)
    submit(one, 3, 1, max_tokens=1, priority=-1.0)
    step(one)
    assert computed(one) == [(1, 1)]  # although there is a place again, and a block
    assert (one.preemptions, one.pool.free) == (1, 1)
    assert computed(one) == [(1, 1), (3, 1)]


# ---- what it says


def test_queued_prefill_counts_tokens_before_all_first_tokens() -> None:
    one = scheduler()
    submit(one, 1, 40)
    submit(one, 2, 10)
    assert one.queued_prefill_tokens() == 50
    step(one)
    assert one.queued_prefill_tokens() == 18
    step(one)
    assert one.queued_prefill_tokens() == 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda one: one.pool.touch(one.running[0].blocks[:1]),
        lambda one: one.running[0].blocks.pop(),
        lambda one: one.running.reverse(),
        lambda one: one.requests.pop(1),
        lambda one: setattr(one.running[0].chain, "named", 9),
        lambda one: one.running.append(one.running[0]),
    ],
)
def test_check_notices_a_broken_invariant(harm: Any) -> None:
    one = scheduler()
    for number in (1, 2):
        submit(one, number, 6)
    step(one)
    one.check()
    harm(one)
    with pytest.raises(AssertionError):
        one.check()
