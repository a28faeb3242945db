"""A replica's description of itself, parsed from its answers. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from engines import owned_by, profile_of
from engines.metrics import MOST_BLOCKS
from engines.profile import EngineProfile
from router.members.ranks import Rank
from router.members.spec import (
    AUTO,
    BadSpec,
    ModelName,
    NativeDescription,
    ReplicaSpec,
    readable_at,
    with_description,
)

MOST_MODELS = 4096  # of one replica, adapters included


class Facts(Struct, frozen=True):
    """A replica, as it described itself."""

    spec: ReplicaSpec  # completed
    models: tuple[str, ...]  # names that clients may ask for, its base model first
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    changes_adapters: bool = False  # it may load and unload them without a word
    tokenizer: str | None = None  # "bytes": a token is a byte
    total_blocks: int | None = None
    draining: bool = False
    loading: bool = False  # its sockets are not known yet, so do not take it for a replica without events
    ranks: tuple[Rank, ...] = ()  # its caches, at least one
    kv_read: str = ""  # the endpoint at which neighbours may read its blocks; empty: none
    kv_layout: str = ""  # only replicas of one layout can use each other's blocks

    @property
    def profile(self) -> EngineProfile:
        return profile_of(self.spec.engine)


class _Pool(Struct, frozen=True):
    total: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)] = 0


class _Native(NativeDescription, frozen=True):
    tokenizer: str | None = None
    pool: _Pool = _Pool()
    adapters: Annotated[list[ModelName], Meta(max_length=MOST_MODELS)] | None = None  # None: it computes with none


class _Model(Struct, frozen=True):
    id: ModelName
    owned_by: str | None = None
    parent: str | None = None
    root: str | None = None
    max_model_len: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class _Models(Struct, frozen=True):
    data: Annotated[list[_Model], Meta(max_length=MOST_MODELS)]


_decode_native = msgspec.json.Decoder(_Native).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def native_facts(spec: ReplicaSpec, body: bytes) -> Facts | None:
    """Parse the answer to GET /load; None if it is not a native replica's."""
    try:
        answer = _decode_native(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    completed = with_description(spec, answer)
    kv_read, kv_layout = readable_at(completed, answer)
    adapters = frozenset(answer.adapters or ()) - {answer.model}
    return Facts(
        spec=completed,
        models=(answer.model, *sorted(adapters)),
        adapters=adapters,
        changes_adapters=answer.adapters is not None,
        tokenizer=answer.tokenizer,
        total_blocks=answer.pool.total or None,
        draining=answer.draining,
        loading=answer.incarnation is None,
        ranks=(Rank(completed),),
        kv_read=kv_read,
        kv_layout=kv_layout,
    )


def foreign_facts(spec: ReplicaSpec, body: bytes) -> Facts:
    """Parse the answer to GET /v1/models; raise BadSpec if it names no model, or not that of the spec."""
    try:
        models = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSpec(f"{spec.name}: /v1/models does not answer as OpenAI's does ({error})") from error
    adapters = {model.id for model in models if model.parent is not None} | set(spec.adapters)
    bases = [model for model in models if model.id not in adapters]
    if not bases:
        raise BadSpec(f"{spec.name}: /v1/models names no model")
    if spec.model is not None and spec.model not in [model.id for model in bases]:
        raise BadSpec(f"{spec.name} serves {bases[0].id!r}, not {spec.model!r}; correct model, or leave it out")
    base = next((model for model in bases if model.id == spec.model), bases[0])
    others = [model.id for model in bases if model is not base]  # further names of the same model
    return Facts(
        spec=msgspec.structs.replace(
            spec,
            model=base.id,
            engine=owned_by(base.owned_by).name if spec.engine == AUTO else spec.engine,
            max_model_len=spec.max_model_len or base.max_model_len,
        ),
        models=(base.id, *others, *sorted(adapters)),
        adapters=frozenset(adapters),
        changes_adapters=True,
    )
