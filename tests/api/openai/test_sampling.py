"""The sampling that a model's generation_config.json asks for."""

from pathlib import Path

import pytest

from api.openai.sampling import SamplingDefaults, sampling_defaults


def written(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_a_model_without_the_file_has_the_defaults_of_openai(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=1, top_p=1, top_k=0)


def test_what_the_file_says_counts_and_the_rest_does_not(tmp_path: Path) -> None:
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "eos_token_id": [1, 2]}'
    assert sampling_defaults(written(tmp_path, text)) == SamplingDefaults(temperature=0.6, top_k=20)
    assert sampling_defaults(written(tmp_path, '{"top_k": -1}')).top_k == 0, "all tokens"


@pytest.mark.parametrize("text", ['{"temperature": "hot"}', '{"top_p": 2}', '{"temperature": NaN}', "[1]", "{"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be used: .*; correct it, or remove it$"):
        sampling_defaults(written(tmp_path, text))
