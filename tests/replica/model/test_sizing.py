"""The formula of the field, with the figures that others have published."""

import pytest

from replica.model.sizing import GIGABYTE, blocks_in, kv_bytes_per_token, kv_memory


@pytest.mark.parametrize(
    ("layers", "kv_gb", "bytes_per_token", "blocks"),
    [
        (32, 56.0, 131_072, 26_702),  # 8B: 8 KV heads of 128 in 16 bits
        (80, 45.0, 327_680, 8_583),  # 70B
    ],
)
def test_known_models_hold_what_is_known_of_them(layers: int, kv_gb: float, bytes_per_token: int, blocks: int) -> None:
    assert kv_bytes_per_token(layers, 8, 128, "bfloat16") == bytes_per_token
    assert blocks_in(kv_gb * GIGABYTE, 16, bytes_per_token) == blocks


def test_what_weights_and_workspace_take_is_not_for_kv() -> None:
    assert kv_memory(80e9, 0.9, 16e9, 1e9) == pytest.approx(55e9)
    assert kv_memory(24e9, 0.5, 16e9, 0) < 0


def test_memory_that_is_a_whole_number_of_blocks_holds_them_all() -> None:
    left = kv_memory(0.7 * GIGABYTE, 0.35, 0, 0)
    assert left < 245_000_000  # binary fractions: a little less
    assert blocks_in(left, 1, 245_000_000) == 1
