"""The native engine's model, as far as a configuration needs it: found, read and measured, without torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from api.openai.sampling import sampling_defaults
from api.tokens.tokenizer import eos_token_ids
from replica.model.config import ModelConfig, read_config
from replica.model.locate import SMOLLM2, locate

AUTO = "auto"  # the type that the model's own configuration names
DEVICES = (AUTO, "cpu", "cuda")
DTYPES = (AUTO, "float32", "bfloat16", "float16")
NEEDED = ("torch", "safetensors")


class NativeModel(NamedTuple):
    folder: Path
    config: ModelConfig
    dtype: str
    max_model_len: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_bytes_per_token(self.dtype)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return eos_token_ids(self.folder)


def find_model(name: str, dtype: str, max_model_len: int | None) -> NativeModel:
    """May download it, or make the demo. ValueError, OSError: it cannot be had, or not be computed like that."""
    if name == SMOLLM2:
        from replica.fetching.fetch import smollm2_folder

        folder: Path | None = smollm2_folder()
    else:
        folder = locate(name)
    if folder is None:
        raise ValueError(
            f"{name!r} is not a model; give smollm2, demo, a folder with its files, or ORG/NAME to download"
        )
    config = read_config(folder)
    sampling_defaults(folder)  # the server reads them again
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"{name} has {longest} positions, so --max-model-len {max_model_len} is too long; give {longest} or less"
        )
    return NativeModel(folder, config, config.dtype if dtype == AUTO else dtype, max_model_len or longest)


def check_installed() -> None:
    """Before anything is downloaded; and here it is in sight of the dispatcher, which names the extra to install."""
    for module in NEEDED:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"the native engine needs {module}", name=module)
