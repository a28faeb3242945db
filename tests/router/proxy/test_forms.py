"""Forms: what several readers could find different fields in is refused."""

import pytest

from api.errors import ApiError
from router.proxy.withheld import MAX_PARTS, PLACING, TRANSFER, check_form

TYPE = b"multipart/form-data; boundary=xyz"
WITHHELD = (*PLACING, *TRANSFER)


def part(head: bytes, value: bytes = b"v") -> bytes:
    return b"--xyz\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


def named(name: bytes) -> bytes:
    return b"Content-Disposition: form-data; name=" + name


FILE = part(named(b'"file"; filename="\xc3\xbcber \\x.wav"') + b"\r\nContent-Type: audio/wav", b"RIFF\0--xy\r\n--xy")
END = b"--xyz--\r\n"


@pytest.mark.parametrize(
    "content_type",
    [TYPE, b'Multipart/Form-Data ;boundary="xyz"', b"multipart/form-data; boundary=xyz; charset=UTF-8"],
)
def test_what_clients_send_is_taken(content_type: bytes) -> None:
    first = part(b"content-type: text/plain\r\n" + named(b'"timestamp_granularities[]"'), b"kv_transfer_params")
    check_form(content_type, b"\r\n" + first + FILE + part(named(b"model")) + END, WITHHELD)


@pytest.mark.parametrize("name", [b'"kv_transfer_params"', b"vllm_xargs", b'"bootstrap_host"', b'"extra_args"'])
def test_a_field_of_the_routers_is_refused(name: bytes) -> None:
    with pytest.raises(ApiError, match="which only the router may; leave it out"):
        check_form(TYPE, FILE + part(named(name)) + END, WITHHELD)
    check_form(TYPE, FILE + part(named(b'"vllm_xargs"')) + END, PLACING)


@pytest.mark.parametrize(
    "head",
    [
        named(b'"vllm%5Fxargs"'),
        named(b'"vllm\\_xargs"'),
        named(b"\"a\"; name*=utf-8''vllm%5Fxargs"),
        named(b'"a"; name="vllm_xargs"'),
        named(b'"a"; filename="\\"; name=\\"vllm_xargs"'),
        named(b'"a"') + b"\r\n" + named(b'"vllm_xargs"'),
        b'Content-Disposition: form-data;\r\n name="vllm_xargs"',
        b"Content-Type: text/plain",
        b"",
    ],
)
def test_a_name_that_readers_could_read_otherwise_is_refused(head: bytes) -> None:
    with pytest.raises(ApiError, match="part 2 of the form cannot be read"):
        check_form(TYPE, FILE + part(head) + END, WITHHELD)


@pytest.mark.parametrize("body", [b'{"model": "m"}', b"", b"before it" + FILE, b"\r\n" * 99 + FILE, b"\n {}" + FILE])
def test_what_does_not_begin_as_a_form_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is no form"):
        check_form(TYPE, body + END.replace(b"xyz", b"abc"), WITHHELD)


def test_lines_that_end_otherwise_are_refused() -> None:
    with pytest.raises(ApiError, match="part 1 of the form"):
        check_form(TYPE, part(named(b'"vllm_xargs"')).replace(b"\r\n", b"\n") + END, WITHHELD)


@pytest.mark.parametrize(
    "more", [b"; charset=utf-16", b"; boundary=abc", b"; boundary*=utf-8''abc", b", application/json", b"\x85", b"@"]
)
def test_a_type_that_readers_could_read_otherwise_is_refused(more: bytes) -> None:
    with pytest.raises(ApiError, match="the Content-Type is"):
        check_form(TYPE + more, FILE + END, WITHHELD)


def test_only_so_many_parts_are_read() -> None:
    check_form(TYPE, part(named(b"a")) * MAX_PARTS + END, WITHHELD)
    with pytest.raises(ApiError, match="more than 2000"):
        check_form(TYPE, part(named(b"a")) * (MAX_PARTS + 1) + END, WITHHELD)
