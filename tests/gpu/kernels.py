"""Every kernel against a reference of higher precision, in processes side by side."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from kernels.paged import KvShape
from tests.gpu import attention_cases, draw_cases, row_cases
from tests.gpu.apart import Ended, Job, apart, last_line
from tests.gpu.place import Place, backends
from tests.gpu.report import Table

T = TypeVar("T")

TITLE = "kernels against references of higher precision"


def run(place: Place, table: Table) -> None:
    jobs = [*row_cases.jobs(place), *draw_cases.jobs(place), *attention_cases.jobs(place)]
    heard, ended = listened(jobs, place)
    unusable(place, table)
    attention(table, [one for one in heard if isinstance(one, attention_cases.Error)])
    rows(table, [one for one in heard if isinstance(one, row_cases.Error)])
    draws(table, [one for one in heard if isinstance(one, draw_cases.Drawn)])
    failed = [error for error in ended if error]
    told = last_line(failed[0]) if failed else "none"
    table.check("cases that could not be computed", not failed, f"{len(failed)} of {len(jobs)}: {told}", "0")
    if failed:
        raise RuntimeError(failed[0])


def listened(jobs: Sequence[Job], place: Place) -> tuple[list[Any], list[str]]:
    heard, ended = [], []
    for _, message in apart(jobs, place.left_s - 2, place.at_once):
        if isinstance(message, Ended):
            ended.append(message.error)
        else:
            heard.append(message.what)
    return heard, ended


def unusable(place: Place, table: Table) -> None:
    for block_size in attention_cases.BLOCK_SIZES:
        for name, reason in backends(place, KvShape(torch.bfloat16, block_size, 64))[1].items():
            table.note(f"attention {name}, bf16, blocks of {block_size}", f"not here: {reason}")


def attention(table: Table, errors: list[attention_cases.Error]) -> None:
    for (backend, dtype, batch), of in grouped(errors, lambda one: (one.backend, named(one.shape.dtype), one.batch)):
        allowed = attention_cases.DTYPES[of[0].shape.dtype]
        bad = [one for one in of if not one.worst <= 1]
        largest, relative = max(one.largest for one in of), max(one.relative for one in of)
        measured = f"error at most {largest:.2g}, {relative:.2g} of the norm; shapes: {len(of)}"
        measured += f"; too much for {bad[0].shape}" if bad else ""
        table.check(f"attention {backend}, {dtype}, {batch}", not bad, measured, f"{allowed:g} (1 + expected)")


def rows(table: Table, errors: list[row_cases.Error]) -> None:
    for (what, dtype), of in grouped(errors, lambda one: (one.what, named(one.dtype))):
        allowed = row_cases.TOLERANCES[of[0].dtype]
        met = all(one.worst <= 1 for one in of)
        measured = f"error at most {max(one.worst for one in of) * allowed:.2g}; tensors: {len(of)}"
        table.check(f"{what}, {dtype}", met, measured, f"{allowed:g} (1 + expected)")


def draws(table: Table, found: list[draw_cases.Drawn]) -> None:
    for one in sorted(found, key=lambda one: one.vocabulary):
        measured = f"{one.equal} of {one.rows} the same, the others within {one.worst:.2g} of the whole"
        name = f"draw from {one.vocabulary:,} tokens against float64"
        table.check(name, one.explained == one.rows, measured, f"{draw_cases.NEAR:g} of the whole")


def grouped(errors: Sequence[T], key: Callable[[T], tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], list[T]]]:
    groups: dict[tuple[str, ...], list[T]] = defaultdict(list)
    for error in errors:
        groups[key(error)].append(error)
    yield from sorted(groups.items())


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
