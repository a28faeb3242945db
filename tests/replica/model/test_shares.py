"""The parts of a model that ranks hold."""

from pathlib import Path

import msgspec
import pytest

from replica.model.config import ModelConfig, read_config
from replica.model.shares import Share, kv_copies, refuse_what_does_not_divide
from tests.replica.folders import model_folder


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_config(Path(model_folder(tmp_path, num_attention_heads=12, num_key_value_heads=2, head_dim=8)))


def shares(size: int) -> list[Share]:
    return [Share(rank, size) for rank in range(size)]


@pytest.mark.parametrize("whole", [5, 8, 1001])
def test_parts_are_nearly_equal_and_leave_nothing_out(whole: int) -> None:
    found = [share.part(whole) for share in shares(4)]
    assert [row for part in found for row in range(whole)[part]] == list(range(whole))
    lengths = [part.stop - part.start for part in found]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_each_query_head_is_with_its_kv_head(config: ModelConfig, size: int) -> None:
    group = config.num_heads // config.num_kv_heads
    for share in shares(size):
        held = range(config.num_kv_heads)[share.kv_heads(config)]
        own = share.own(config)
        assert (own.num_kv_heads, own.num_heads * size) == (len(held), config.num_heads)
        heads = range(config.num_heads)[share.part(config.num_heads)]
        assert [head // group for head in heads] == [
            held[place // (own.num_heads // own.num_kv_heads)] for place in range(len(heads))
        ]


def test_ranks_beyond_the_kv_heads_hold_copies(config: ModelConfig) -> None:
    assert [kv_copies(config, size) for size in (1, 2, 4, 12)] == [1, 1, 2, 6]


@pytest.mark.parametrize(
    ("changes", "size", "said"),
    [
        ({}, 5, "--tensor-parallel-size 5 does not divide the model's 12 attention heads; give a divisor of them"),
        ({}, 3, "--tensor-parallel-size 3 fits the model's 2 KV heads only if one number divides the other"),
        ({"vocab_size": 3}, 4, "--tensor-parallel-size 4 is more than the model's .* vocabulary of 3; give less"),
    ],
)
def test_what_does_not_divide_is_refused(config: ModelConfig, changes: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_what_does_not_divide(msgspec.structs.replace(config, **changes), size)
