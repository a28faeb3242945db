"""The list of models as Anthropic's clients read it: those that send the header of its API's version."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from api.responses import Model, ModelList

VERSION_HEADER = "anthropic-version"


class ModelInfo(Struct, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | UnsetType = UNSET


class ModelPage(Struct, kw_only=True):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def listed(models: Sequence[Model], headers: Mapping[str, str]) -> ModelList | ModelPage:
    if VERSION_HEADER not in headers:
        return ModelList(data=list(models))
    ids = [model.id for model in models]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return ModelPage(data=[_info(model) for model in models], first_id=first, last_id=last)


def shown(model: Model, headers: Mapping[str, str]) -> Model | ModelInfo:
    return _info(model) if VERSION_HEADER in headers else model


def _info(model: Model) -> ModelInfo:
    created_at = datetime.fromtimestamp(model.created, UTC)
    return ModelInfo(id=model.id, display_name=model.id, created_at=created_at, max_input_tokens=model.max_model_len)
