"""Translates between protobuf messages and our own; a message that cannot be read is refused by a ValueError.

Envoy's messages of external processing (envoy.service.ext_proc.v3) are described here as far as a picker reads and
writes them, with Envoy's numbers and types; other fields are skipped. Packages that hold all of Envoy's messages put
folders such as `opentelemetry` and `google` into site-packages, where they hide those of others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Described
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError

from router.http.picker.stream import (
    Message,
    Mode,
    Mutation,
    Refusal,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from router.members.upstream import Header

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE = "grpc.health.v1.Health"
PACKAGE = "warmroute.picker"
STRUCT = "google.protobuf.Struct"

# Each message has its fields as (number, type); `*` marks those that are repeated.
MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "Namespace": {"key": (1, "string"), "value": (2, STRUCT)},  # an entry of a map
    "Metadata": {"filter_metadata": (1, "*Namespace")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "BodyMutation": {"body": (1, "bytes"), "streamed_response": (3, "HttpBody")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "PartResponse": {"response": (1, "CommonResponse")},  # a mutation of headers or of a body
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "PartResponse"),
        "response_headers": (2, "PartResponse"),
        "request_body": (3, "PartResponse"),
        "response_body": (4, "PartResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, STRUCT),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
SCALARS = {
    "string": Described.TYPE_STRING,
    "bytes": Described.TYPE_BYTES,
    "bool": Described.TYPE_BOOL,
    "int32": Described.TYPE_INT32,  # enums, too: new values of theirs are no errors
}


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="warmroute/picker.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            described, kind_of_one = message.field.add(name=field, number=number), kind.lstrip("*")
            described.label = Described.LABEL_REPEATED if kind.startswith("*") else Described.LABEL_OPTIONAL
            if kind_of_one in SCALARS:
                described.type = SCALARS[kind_of_one]
            else:
                described.type = Described.TYPE_MESSAGE
                described.type_name = f".{STRUCT}" if kind_of_one == STRUCT else f".{PACKAGE}.{kind_of_one}"
    pool = descriptor_pool.DescriptorPool()  # our own pool: nobody else's messages can have the same names
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _classes()
ProcessingRequest: Any = CLASSES["ProcessingRequest"]
ProcessingResponse: Any = CLASSES["ProcessingResponse"]
HealthCheckRequest: Any = CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = CLASSES["HealthCheckResponse"]

# ---- from the gateway

LB = "envoy.lb"
ENDPOINT = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_HINT, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
OVERWRITE, APPEND = 2, 0  # HeaderAppendAction
MAX_STATUS = 599
MAX_READ = 1000  # headers of a message; the router takes far fewer

_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")  # RFC 9110, 5.6.2
_BREAKS = re.compile(rb"[\r\n\0]")


def read(raw: bytes) -> Message:
    """One of our messages from the bytes of a ProcessingRequest."""
    check_sizes(raw)
    try:
        message = ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"the message cannot be decoded: {error}") from None
    if message.HasField("request_headers"):
        headers, config = message.request_headers, message.protocol_config
        told = message.HasField("protocol_config")
        return RequestHeaders(
            list(_headers(headers.headers)),
            headers.end_of_stream,
            config.request_body_mode if told else Mode.FULL_DUPLEX_STREAMED,
            config.response_body_mode if told else Mode.FULL_DUPLEX_STREAMED,
            _subset(_metadata(message, SUBSET_HINT, SUBSET)),
        )
    if message.HasField("request_body"):
        return RequestBody(message.request_body.body, message.request_body.end_of_stream)
    if message.HasField("request_trailers"):
        trailers = message.request_trailers.trailers
        if len(trailers.headers) > MAX_READ:
            raise ValueError(f"{len(trailers.headers):,} trailers; at most {MAX_READ:,} are taken")
        return RequestTrailers(tuple(dict.fromkeys(name for name, _ in _headers(trailers))))
    if message.HasField("response_headers"):
        given = list(_headers(message.response_headers.headers))
        status = next((value for name, value in given if name == b":status"), b"")
        if not (status.isdigit() and len(status) == 3 and 100 <= int(status) <= MAX_STATUS):
            raise ValueError(f"the answer's :status is {status[:20]!r}; it must be a number of three digits")
        served = _metadata(message, LB, SERVED)
        address = served.string_value if served is not None and served.HasField("string_value") else None
        plain = [header for header in given if not header[0].startswith(b":")]
        return ResponseHeaders(int(status), plain, message.response_headers.end_of_stream, address or None)
    if message.HasField("response_body"):
        return ResponseBody(message.response_body.body, message.response_body.end_of_stream)
    if message.HasField("response_trailers"):
        return ResponseTrailers()
    raise ValueError("the message has neither headers nor a body nor trailers")


def _headers(given: Any) -> Iterator[Header]:
    for header in islice(given.headers, MAX_READ):
        name, value = header.key.encode().lower(), header.raw_value or header.value.encode()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:50]!r} is no name of a header")
        if _BREAKS.search(value):
            raise ValueError(f"the header {name[:50]!r} has a line break or a zero byte")
        yield name, value


def _metadata(message: Any, namespace: str, key: str) -> Any:
    """A value of the gateway's metadata; None: there is none."""
    for entry in message.metadata_context.filter_metadata:
        if entry.key == namespace and key in entry.value.fields:
            return entry.value.fields[key]
    return None


def _subset(value: Any) -> frozenset[str] | None:
    """The addresses of a list, or of text with commas, as a gateway's rules make it of a header."""
    if value is None:
        return None
    listed = value.list_value.values if value.HasField("list_value") else [value]
    texts = (one.string_value for one in listed)
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


# ---- to the gateway


def written(reply: Reply | Refusal) -> bytes:
    """The bytes of a ProcessingResponse."""
    response = ProcessingResponse()
    if isinstance(reply, Refusal):
        immediate = response.immediate_response
        immediate.status.code, immediate.body = reply.status, reply.body
        _set(immediate.headers, reply.headers)
    elif reply.about.endswith("trailers"):
        trailers = getattr(response, reply.about)
        trailers.SetInParent()
        _mutate(trailers.header_mutation, reply.mutation)
    else:
        common = getattr(response, reply.about).response
        common.SetInParent()
        _mutate(common.header_mutation, reply.mutation)
        if reply.part is not None:
            streamed = common.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = reply.part, reply.end
        elif reply.whole is not None:
            common.body_mutation.body = reply.whole
        if reply.endpoints:
            common.clear_route_cache = True
            response.dynamic_metadata.update({LB: {ENDPOINT: reply.endpoints}})
    return bytes(response.SerializeToString())


def _mutate(made: Any, mutation: Mutation) -> None:
    _set(made, mutation.changed)
    made.remove_headers.extend(name.decode("latin-1") for name in mutation.removed)


def _set(made: Any, headers: Iterable[Header]) -> None:
    """Set headers; of several with the same name the first one takes the place of those that are there."""
    seen: set[bytes] = set()
    for name, value in headers:
        option = made.set_headers.add(append_action=APPEND if name in seen else OVERWRITE)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
        seen.add(name)


# ---- what a message has beside a body, bounded before it is decoded: headers take two bytes there, and many more here


MAX_BESIDE_BYTES = 256 * 1024  # headers and metadata
MAX_FIELDS = 1000  # a usual message has three
BODIES = frozenset(MESSAGES["ProcessingRequest"][name][0] for name in ("request_body", "response_body"))

LONGEST_VARINT = 10


def check_sizes(raw: bytes) -> None:
    """Raise ValueError if so many bytes are no part of a body."""
    if len(raw) <= MAX_BESIDE_BYTES:
        return
    at = beside = fields = 0
    while at < len(raw):
        start, fields = at, fields + 1
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(raw, at)
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"the message has a field of the wire type {kind}")
        beside += 0 if tag >> 3 in BODIES else at - start
        if beside > MAX_BESIDE_BYTES or fields > MAX_FIELDS:
            raise ValueError(f"the message has more than {MAX_BESIDE_BYTES:,} bytes beside a body; send less")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * LONGEST_VARINT, 7):
        if at >= len(raw):
            break
        byte, at = raw[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("the message has a number without an end")
