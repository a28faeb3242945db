"""The command `warmroute size`."""

from collections.abc import Iterator

import click
import msgspec

from api.process.options import option
from api.process.settings import ABOVE_0, AT_LEAST_0, FiniteRange, Unusable
from lab.commands.common import check_options
from lab.size import DoesNotFit, Format, Room, Size, config_of, gigabytes, size_of
from replica.model.sizing import GIGABYTE

NUMBERS = ("none", "fp8", "int8", "int4")
COMPUTED = ("float32", "bfloat16", "float16")
KV_DTYPE = click.Choice([*COMPUTED, "fp8"])
SHARE = FiniteRange(min=0, max=1, min_open=True)
EXCLUDES = [("utilization", "kv_gb"), ("workspace_gb", "kv_gb")]


@click.command()
@click.argument("model")
@option("--memory-gb", "GB", "The memory of a device, as its maker gives it: 80 of an H100.", type=ABOVE_0)
@option("--kv-gb", "GB", "Memory for KV alone, instead of both.", type=ABOVE_0)
@option("--utilization", "FRACTION", "How much of the memory to use.  [default: 0.9]", type=SHARE)
@option("--weights-gb", "GB", "Memory of the weights.  [default: computed]", type=AT_LEAST_0)
@option("--workspace-gb", "GB", "Memory for computing, beside the weights.  [default: 0]", type=AT_LEAST_0)
@option("--dtype", "TYPE", f"{', '.join(COMPUTED)}.  [default: the model's]", type=click.Choice(COMPUTED))
@option("--quantization", "NAME", f"Of the weights: {', '.join(NUMBERS)}.", type=click.Choice(NUMBERS), default="none")
@option("--kv-dtype", "TYPE", "Of the KV: one of those, or fp8.  [default: --dtype]", type=KV_DTYPE)
@option("--block-size", "TOKENS", "Tokens in a block.", type=click.IntRange(1, 4096), default=16)
@option("--tensor-parallel", "N", "Devices that share the model.", type=click.IntRange(1, 1024), default=1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, in bytes.")
def size(
    model: str,
    memory_gb: float | None,
    kv_gb: float | None,
    utilization: float | None,
    weights_gb: float | None,
    workspace_gb: float | None,
    dtype: str | None,
    quantization: str,
    kv_dtype: str | None,
    block_size: int,
    tensor_parallel: int,
    as_json: bool,
) -> None:
    """Compute how much KV cache fits beside a model on a device, from its shape; nothing is loaded.

    MODEL is a folder with a config.json, that file, or one of demo, llama-3-8b, llama-3-70b, mistral-7b, qwen2.5-7b,
    qwen3-0.6b.

    \b
      blocks = (memory x utilization - weights - workspace)
               / (2 x block size x KV heads x head dimension x bytes x layers)

    rounded down. A GB is 10^9 bytes. With --tensor-parallel every figure is of one of the devices.

    \b
    Examples:
      warmroute size llama-3-8b --memory-gb 80
      warmroute size llama-3-70b --kv-gb 45 --quantization int4
      warmroute size path/to/model --memory-gb 24 --workspace-gb 1.5 --json

    Exit status: 0 it fits, 1 it does not, 2 invalid value.
    """
    if (memory_gb is None) == (kv_gb is None):
        raise Unusable("how much memory is there? Give one of --memory-gb and --kv-gb")
    check_options({}, EXCLUDES)
    memory, kv, weights_bytes = (None if each is None else each * GIGABYTE for each in (memory_gb, kv_gb, weights_gb))
    room = Room(memory, kv, utilization or 0.9, weights_bytes, (workspace_gb or 0.0) * GIGABYTE)
    config = config_of(model)
    dtype = dtype or config.dtype
    weights = dtype if quantization == "none" else quantization
    form = Format(weights, kv_dtype or dtype, block_size, tensor_parallel)
    try:
        answer = size_of(model, config, room, form)
    except DoesNotFit as error:
        fix = "give a larger device, --quantization, or more devices with --tensor-parallel"
        if room.memory is None:
            fix = "give more, or a smaller --block-size"
        raise click.ClickException(f"{model}: {error}; {fix}") from error
    click.echo(msgspec.json.encode(answer).decode() if as_json else "\n".join(lines(answer, room, form)))


def lines(answer: Size, room: Room, form: Format) -> Iterator[str]:
    each = f", on each of {form.devices} devices" if form.devices > 1 else ""
    weights = f"{gigabytes(answer.weights_bytes)}  {'as given' if room.weights is not None else form.weights}{each}"
    reckoning = "as given"
    if room.memory is not None:
        reckoning = f"= {room.memory / GIGABYTE:g} GB x {room.utilization:g} - {gigabytes(answer.weights_bytes)}"
        reckoning += f" - {gigabytes(room.workspace)}" if room.workspace else ""
    for name, value in (
        ("model", answer.model),
        ("parameters", f"{answer.parameters:,}"),
        ("weights", weights),
        ("for KV", f"{gigabytes(answer.kv_bytes)}  {reckoning}{each}"),
        ("KV of a token", f"{answer.kv_bytes_per_token:,} bytes  {form.kv}"),
        ("KV of a block", f"{answer.kv_bytes_per_block:,} bytes  {form.block_size} tokens"),
        ("fits", f"{answer.blocks:,} blocks = {answer.tokens:,} tokens"),
    ):
        yield f"{name:<15}{value}"
    for fitting in answer.fitting:
        yield f"{'':<15}{fitting.requests:,} requests of {fitting.tokens:,} tokens at once"
