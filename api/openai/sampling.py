"""The sampling of requests that do not say otherwise: the model's own, as its generation_config.json has it."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from api.model_files import read_model_file

MAX_INT = 2**31 - 1
OF_THE_MODEL: Any = None  # a request's field until it is completed

Temperature: TypeAlias = Annotated[float, Meta(ge=0)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_INT)]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0)]


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

    def complete(self, request: Any) -> None:
        for name in self.__struct_fields__:
            if getattr(request, name) is OF_THE_MODEL:
                setattr(request, name, getattr(self, name))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return what the model's own file says; ValueError, with its name, where that cannot be used."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        given = msgspec.json.decode(read_model_file(file), type=dict[str, Any])
        said = {name: value for name, value in given.items() if value is not None and (name, value) != ("top_k", -1)}
        return msgspec.convert(said, SamplingDefaults)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} cannot be used: {error}; correct it, or remove it") from error
