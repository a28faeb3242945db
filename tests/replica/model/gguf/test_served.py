"""`warmroute replica --model FILE.gguf` serves the file as it serves a folder."""

from pathlib import Path

from replica.model.demo import CACHE_VARIABLE
from tests.replica.model.gguf.files import gguf_of
from tests.replica.models import logits
from tests.replica.natives import SMALL, ask, native, refused


def test_a_file_is_served(tmp_path: Path) -> None:
    file = gguf_of("qwen2", tmp_path)
    with native(file, *SMALL, **{CACHE_VARIABLE: str(tmp_path / "cache")}) as served:
        [choice] = ask(served, "abc", max_tokens=4)["choices"]
    prompt = choice["prompt_token_ids"]
    assert len(prompt) == 2, "its own tokenizer has ab"
    said = logits("qwen2", [*prompt, *choice["token_ids"][:-1]])
    assert said[1:].argmax(-1).tolist() == choice["token_ids"]


def test_a_file_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    file = gguf_of("llama", tmp_path, {"general.architecture": "gemma3"})
    status, said = refused("--model", file, **{CACHE_VARIABLE: str(tmp_path / "cache")})
    assert status == 2
    assert said.splitlines()[-1].startswith(f"Error: --model: {file}: the architecture 'gemma3' is not supported")
