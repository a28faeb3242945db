"""The tensors of a model's safetensors files, or of its GGUF, each read when it is asked for.

Tensors returned by `take` may share the file's memory: never write to them.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128

from api.model_files import read_object
from replica.model.config import some
from replica.model.progress import Progress

log = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GGUF_FILE = "model.gguf"
FLOATS = {"F64", "F32", "F16", "BF16"}
# Rotations are computed, not read; lm_head stays unread only where it is tied to the embeddings.
HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight|rope_freqs\.weight")


class Weights:
    """`take` every tensor, then `finish`. As a context it closes its files also when something fails."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        send: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        digests: bool = False,
    ) -> None:
        """`send` takes a tensor to the device; without it they stay on the CPU. `digests`: `digest` is wanted."""
        self._digest = xxh3_128() if digests else None
        self._folder = folder
        self._dtype = dtype
        self._send = send
        opened = cache(_opened)
        self._places = dict(_places(folder, opened))  # the file of each tensor
        self._unread = set(self._places)
        files = sorted(set(self._places.values()))
        self._open = {file: opened(file) for file in files}
        sizes = (getattr(opened, "loaded_bytes", file.stat().st_size) for file, opened in self._open.items())
        self._progress = Progress(f"loading {folder.name}", sum(sizes))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of this name, in the dtype and on the device. ValueError where it is missing or another one."""
        if name not in self._places:
            raise ValueError(f"{self._folder} has no tensor {name}; the checkpoint does not fit its config.json")
        file = self._places[name]
        try:
            found = self._open[file].get_slice(name)
            if found.get_dtype() not in FLOATS:
                raise ValueError(
                    f"{file}: {name} has dtype {found.get_dtype()}; quantized weights are not supported, "
                    "use the checkpoint in bfloat16, float16 or float32"
                )
            if tuple(found.get_shape()) != shape:
                raise ValueError(f"{file}: {name} has shape {tuple(found.get_shape())}; config.json asks for {shape}")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: {name} cannot be read: {error}; get the file again") from error
        self._unread.discard(name)
        self._progress.advance(math.prod(shape) * tensor.itemsize)
        if self._digest is not None:
            self._digest.update(f"{name} {shape} {tensor.dtype}".encode())
            self._digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        what = f"{file}: {name}"
        converted = (tensor if self._send is None else self._send(tensor)).to(self._dtype)
        narrows = self._dtype == torch.float16 and tensor.dtype != torch.float16
        if narrows and not bool(converted.isfinite().all()):
            raise ValueError(f"{what} has values that float16 cannot hold; use bfloat16 or float32")
        return converted

    @property
    def digest(self) -> str:
        """A digest of all tensors that were taken, in their order, whatever files they lie in."""
        return "" if self._digest is None else self._digest.hexdigest()

    def finish(self) -> None:
        """Close the files after the last tensor is taken, and log unused tensors."""
        if unused := sorted(name for name in self._unread if not HARMLESS.fullmatch(name)):
            said = "%s: %d tensors are not part of the model and stay unused: %s"
            log.warning(said, self._folder, len(unused), some(unused))
        self._progress.finish()
        self.close()

    def close(self) -> None:
        self._open.clear()  # the handles close when nothing refers to them; tensors keep their own memory

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _places(folder: Path, opened: Callable[[Path], Any]) -> Iterator[tuple[str, Path]]:
    """Each tensor and its file, by the one file there is or by the index of the shards."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not (os.path.lexists(single) or index.is_file()):
        single = folder / GGUF_FILE
    if single.is_file():
        yield from ((name, single) for name in opened(single).keys())  # noqa: SIM118
    elif single.is_dir():
        raise ValueError(f"{single} is a folder; it must be the file with the weights: get it again")
    elif single.is_symlink():
        raise ValueError(f"{single} is a link to {single.readlink()}, which is not there; get the weights again")
    elif index.is_file():
        try:
            names = read_object(index)["weight_map"]
            places = {str(name): str(shard) for name, shard in names.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not the index of a checkpoint: {error!r}; get the file again") from error
        for shard in sorted(set(places.values())):
            if Path(shard).name != shard or shard in ("", ".."):
                raise ValueError(f"{index} names the shard {shard!r}; shards must lie beside it")
            file = index.parent / shard
            if not file.is_file():
                raise ValueError(f"{file} is missing, which {index.name} names; download the rest of the checkpoint")
            held = set(_opened(file).keys())
            if lost := sorted(name for name, its in places.items() if its == shard and name not in held):
                raise ValueError(
                    f"{file} has no tensor {lost[0]!r}, which {index.name} says it has; get both files again"
                )
        yield from ((name, index.parent / shard) for name, shard in places.items())
    else:
        advice = "download the weights too"
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            advice = "its weights are pickles, which may run code: convert them to safetensors"
        elif others := sorted(file.name for file in folder.glob("*.safetensors")):
            advice = f"{some(others)} is not in Hugging Face's layout: convert it"
        elif others := sorted(file.name for file in folder.glob("*.gguf")):
            advice = f"name the file {others[0]} itself"
        raise ValueError(f"{folder} has no {SINGLE_FILE}, {INDEX_FILE} or {GGUF_FILE}; {advice}")


def _opened(file: Path) -> Any:
    """Map the file; read only its header."""
    if file.name == GGUF_FILE:
        from replica.model.gguf.weights import GgufTensors  # gguf: not needed for other models

        return GgufTensors(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}; get it again "
            "(a file of about 130 bytes is a pointer of Git LFS)"
        ) from error
