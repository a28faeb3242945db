"""What a replica says of itself, read out of its answers. Pure."""

import re

import msgspec
from msgspec import Struct

from router.spec import BadSpec, Engine, NativeAnswer, ReplicaSpec, told

_METRIC = re.compile(
    rb"^(?:vllm:num_requests|sglang:num)_(running|waiting|running_reqs|queue_reqs)(?:\{[^}]*\})? ([0-9.eE+-]+)", re.M
)


class Facts(Struct, frozen=True):
    """A replica, as it described itself."""

    spec: ReplicaSpec  # completed
    native: bool
    models: tuple[str, ...]  # what clients may ask for, its base model first
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    tokenizer: str | None = None  # "bytes": a token is a byte
    total_blocks: int | None = None
    draining: bool = False
    loading: bool = False  # it does not know its sockets yet, and is not to be taken for one without events


class _Pool(Struct, frozen=True):
    total: int = 0


class _Native(NativeAnswer, frozen=True):
    tokenizer: str | None = None
    pool: _Pool = _Pool()


class _Model(Struct, frozen=True):
    id: str
    owned_by: str | None = None
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _Models(Struct, frozen=True):
    data: list[_Model]


_decode_native = msgspec.json.Decoder(_Native).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def native_facts(spec: ReplicaSpec, body: bytes) -> Facts | None:
    """Of the answer to GET /load; None: that is not one of ours."""
    try:
        answer = _decode_native(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    completed = told(spec, answer)
    return Facts(
        spec=completed,
        native=True,
        models=(answer.model,),
        tokenizer=answer.tokenizer,
        total_blocks=answer.pool.total or None,
        draining=answer.draining,
        loading=answer.incarnation is None,
    )


def foreign_facts(spec: ReplicaSpec, body: bytes) -> Facts:
    """Of the answer to GET /v1/models. BadSpec where that names no model, or another one than the spec does."""
    try:
        models = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
            engine=_engine(spec.engine, base.owned_by),
            max_model_len=spec.max_model_len or base.max_model_len,
        ),
        native=False,
        models=(base.id, *others, *sorted(adapters)),
        adapters=frozenset(adapters),
    )


def _engine(named: Engine, owner: str | None) -> Engine:
    if named != "auto":
        return named
    return owner if owner in ("vllm", "sglang") else "openai"  # type: ignore[return-value]


def scraped_queue(metrics: bytes) -> tuple[int, int] | None:
    """Running and waiting requests, out of the /metrics of vLLM or SGLang; None: they are not there."""
    counts = {"running": 0.0, "waiting": 0.0}
    found = False
    try:
        for name, value in _METRIC.findall(metrics):
            found = True
            counts["running" if name.startswith(b"running") else "waiting"] += float(value)
        return (int(counts["running"]), int(counts["waiting"])) if found else None
    except (ValueError, OverflowError):
        return None
