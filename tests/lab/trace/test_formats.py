"""Trace files are read, or refused with the place where they are wrong."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.trace.formats import BadTrace, read_log, read_trace
from lab.trace.requests import TraceRequest, coarsened
from router.log_lines import LogLine


def mooncake(at_ms: int, tokens: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": blocks, **more}


def written(folder: Path, lines: list[Any], name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def logged(request_id: str, ts: float, tokens: int, blocks: list[int], **more: Any) -> bytes:
    fields = {"block_tokens": 16, **more}
    return msgspec.json.encode(
        LogLine(ts=ts, request_id=request_id, model="m", prompt_tokens=tokens, blocks=blocks, **fields)
    )


def test_a_mooncake_file_is_read_from_its_first_arrival_on(tmp_path: Path) -> None:
    path = written(tmp_path, [mooncake(3000, 700, [1, 2]), mooncake(4500, 512, [1], type="chat")])
    trace = read_trace(path)
    assert (trace.name, trace.block_tokens) == ("trace", 512)
    assert trace.requests == [
        TraceRequest(0.0, 700, 7, (1, 2)),
        TraceRequest(1.5, 512, 7, (1,)),
    ]
    assert (trace.span_s, trace.input_tokens) == (1.5, 1212)
    assert sum(len(request.blocks) for request in trace.requests) == 3


@pytest.mark.parametrize("size", [16, 48, 64, 512, 1000])
def test_the_block_size_is_found_out_from_lengths_and_numbers_of_blocks(tmp_path: Path, size: int) -> None:
    lengths = [1, size - 1, size, size + 1, 7 * size + 3, 20 * size]
    path = written(tmp_path, [mooncake(0, tokens, [*range(-(-tokens // size))]) for tokens in lengths])
    assert read_trace(path).block_tokens == size


def test_a_first_line_may_say_how_long_blocks_are_and_runs_stand_for_numbers(tmp_path: Path) -> None:
    meta = {"meta": {"block_size": 64, "source": "somewhere"}}
    runs = [{**mooncake(at_ms, 300, []), "hash_runs": numbers} for at_ms, numbers in ((0, [7, 2, 40, 3]), (5, [7, 5]))]
    for line in runs:
        del line["hash_ids"]
    trace = read_trace(written(tmp_path, [meta, *runs]))
    assert trace.block_tokens == 64
    assert [request.blocks for request in trace.requests] == [(7, 8, 40, 41, 42), (7, 8, 9, 10, 11)]


def test_a_file_may_name_full_blocks_only(tmp_path: Path) -> None:
    meta = {"meta": {"block_size": 64}}
    lines = [mooncake(0, 130, [1, 2]), mooncake(0, 130, [1, 2]), mooncake(0, 128, [1, 2]), mooncake(0, 10, [])]
    first, second, full, short = (request.blocks for request in read_trace(written(tmp_path, [meta, *lines])).requests)
    assert first[:2] == second[:2] == full == (1, 2)
    assert len({first[2:], second[2:], short}) == 3 and len(first) == len(second) == 3 and len(short) == 1


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        ([1], "are not pairs"),
        ([1, 0], "are not pairs"),
        ([1, -3], "are not pairs"),
        (None, "either hash_ids or hash_runs"),
    ],
)
def test_runs_that_cannot_be_are_refused(tmp_path: Path, runs: list[int] | None, complaint: str) -> None:
    line = {"timestamp": 0, "input_length": 300, "output_length": 1, **({} if runs is None else {"hash_runs": runs})}
    with pytest.raises(BadTrace, match=f"line 1: .*{complaint}"):
        read_trace(written(tmp_path, [line]))


def test_a_line_that_names_more_blocks_than_there_is_memory_for_is_refused(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 10**9, "output_length": 1, "hash_runs": [0, 10**9]}
    for lines in ([line], [{"meta": {"block_size": 1}}, line]):
        with pytest.raises(BadTrace, match="names 1,000,000,000 blocks; 100,000,000 can be read"):
            read_trace(written(tmp_path, lines))


@pytest.mark.parametrize("meta", [{"meta": {}}, {"meta": {"block_size": 0}}, {"meta": 3}])
def test_a_first_line_that_says_it_wrongly_is_refused(tmp_path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises(BadTrace, match=r"line 1: .*the first line may be"):
        read_trace(written(tmp_path, [meta, mooncake(0, 10, [1])]))


def test_gzipped_files_are_read_by_what_they_hold_and_not_by_their_name(tmp_path: Path) -> None:
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(written(tmp_path, [mooncake(0, 10, [1])]).read_bytes()))
    assert read_trace(packed).name == "trace"
    renamed = packed.rename(tmp_path / "trace")
    assert len(read_trace(renamed).requests) == 1


def test_a_request_log_is_read_without_unfinished_blocks(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    same = {"output_tokens": 5}
    lines = [
        logged("a", 100.0, 40, [8, 9], **same),
        logged("b", 101.0, 40, [8, 9], **same),
        logged("c", 102.0, 32, [8, 9]),
    ]
    path.write_bytes(b"\n".join(lines))
    first, second, full = read_trace(path).requests
    assert (first.at_s, second.at_s, first.output_tokens, full.output_tokens) == (0.0, 1.0, 5, 0)
    assert first.blocks[:2] == second.blocks[:2] == full.blocks == (8, 9)
    assert first.blocks[2] != second.blocks[2]
    assert [line.request_id for line in read_log(path)] == ["a", "b", "c"]


def test_requests_of_a_log_whose_prompts_are_not_exact_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    path.write_bytes(logged("a", 1.0, 16, [8]) + b"\n" + logged("b", 2.0, 40, [], block_tokens=0))
    assert len(read_trace(path).requests) == 1
    path.write_bytes(logged("b", 2.0, 40, [], block_tokens=0))
    with pytest.raises(BadTrace, match="no request of it names its blocks"):
        read_trace(path)


LINES = [logged(name, 100.0, 16, [8]) for name in "abcd"]
TORN = LINES[1][: len(LINES[1]) // 2]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([LINES[0], TORN, LINES[2]], "ac"),
        ([LINES[0], TORN + LINES[2], LINES[3]], "ad"),  # another router went on in the same line
        ([LINES[0], b'{"ts":1.0,"prompt_tokens":' + LINES[2], LINES[3]], "ad"),
        ([LINES[0], LINES[1], TORN], "ab"),
        ([LINES[0], b"\0" * 100, LINES[1]], "ab"),  # after the machine has failed
        ([TORN, LINES[2]], "c"),
        ([LINES[0], LINES[1], b"{}"], "ab"),
        ([LINES[0], LINES[1][:-1] + b',"body":' + b"[" * 100_000 + b"]" * 100_000 + b"}", LINES[2]], "ac"),
    ],
)
def test_lines_of_a_log_that_are_torn_are_left_out(tmp_path: Path, lines: list[bytes], names: str) -> None:
    path = tmp_path / "requests.log"
    path.write_bytes(b"\n".join(lines))
    assert "".join(line.request_id for line in read_log(path)) == names
    assert len(read_trace(path).requests) == len(names)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([TORN, TORN], "line 1: .*each line is one request"),
        ([LINES[0], b"{}", LINES[1]], "line 2: .*missing required field.*each line is one request"),
        ([b'{"request_id":1}'], "line 1: .*each line is one request"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, lines: list[bytes], complaint: str) -> None:
    path = tmp_path / "requests.log"
    path.write_bytes(b"\n".join(lines))
    for read in (lambda: list(read_log(path)), lambda: read_trace(path)):
        with pytest.raises(BadTrace, match=complaint):
            read()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no requests"),
        ("{\n", "line 1: .*truncated; each line is"),
        (json.dumps(mooncake(0, 10, [1])) + "\n\n{}\n", "line 3: .*timestamp"),
        (json.dumps(mooncake(0, 10, [1])).replace("10", '"x"'), "line 1: .*input_length"),
        (json.dumps(mooncake(0, 10, [])), "names a block"),
        (json.dumps(mooncake(0, -5, [1])), "line 1: .*input_length"),
        (json.dumps(mooncake(0, 10, [1])).replace(": 0", ': "nan"'), "line 1: .*timestamp"),
        (json.dumps(mooncake(0, 10, [1])).replace(": 0", ": 1e300"), "line 1: .*timestamp"),
        (
            json.dumps(mooncake(0, 10, [1])).replace(": 7", ": 7" + "0" * 400),
            "line 1: .*output_length|line 1: .*Integer",
        ),
        (json.dumps(mooncake(0, 512, [1])) + "\n" + json.dumps(mooncake(0, 512, [1, 2, 3])), "no block size fits"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadTrace, match=complaint):
        read_trace(path)


def test_a_mark_at_the_beginning_is_skipped_and_utf_16_is_named(tmp_path: Path) -> None:
    text = json.dumps(mooncake(0, 10, [1]))
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8-sig")
    assert len(read_trace(path).requests) == 1
    path.write_text(text, encoding="utf-16")
    with pytest.raises(BadTrace, match="is UTF-16; convert"):
        read_trace(path)


def test_a_pipe_is_refused_with_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadTrace, match="save what it gives"):
        read_trace(tmp_path / "pipe")


def test_numbers_that_say_nothing_of_what_was_before_are_numbered_again(tmp_path: Path) -> None:
    path = written(tmp_path, [mooncake(0, 2100, [1, 9, 2, 9, 3]), mooncake(1000, 2100, [5, 9, 6, 9, 7])])
    first, second = (set(request.blocks) for request in read_trace(path).requests)
    assert len(first) == len(second) == 5 and not first & second
    assert not set(coarsened(read_trace(path), 2).requests[0].blocks) & set(
        coarsened(read_trace(path), 2).requests[1].blocks
    )


def test_a_block_size_that_does_not_fit_names_the_request(tmp_path: Path) -> None:
    path = written(tmp_path, [mooncake(0, 200, [1]), mooncake(0, 600, [1])])
    with pytest.raises(BadTrace, match="line 2 has 600 tokens, which is 3 blocks of 256, but it names 1"):
        read_trace(path, block_tokens=256)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(mooncake(0, n, [n])).encode() + b"\n" for n in range(1, 500)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTrace, match=r"cut.jsonl.gz is damaged"):
        read_trace(path)
