"""Translates between protobuf messages and our own; a message that cannot be read is refused by a ValueError.

Envoy's messages of external processing (envoy.service.ext_proc.v3) are described here as far as a picker reads and
writes them, with Envoy's numbers and types; other fields are skipped. Packages that hold all of Envoy's messages put
folders such as `opentelemetry` and `google` into site-packages, where they hide those of others.
"""

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Described
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError

from router.http.picker import stream
from router.members.upstream import Header

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE = "grpc.health.v1.Health"
PACKAGE = "warmroute.picker"
STRUCT = ".google.protobuf.Struct"
SCALARS = "string", "bytes", "bool", "int32"  # enums are the last: new values of theirs are no errors

# Fields have a number, a type and a name; `*` marks those that are repeated.
MESSAGES = """
HeaderValue { 1 string key, 2 string value, 3 bytes raw_value }
HeaderMap { 1 *HeaderValue headers }
HeaderValueOption { 1 HeaderValue header, 3 int32 append_action }
HeaderMutation { 1 *HeaderValueOption set_headers, 2 *string remove_headers }
Namespace { 1 string key, 2 Struct value }
Metadata { 1 *Namespace filter_metadata }
ProtocolConfiguration { 1 int32 request_body_mode, 2 int32 response_body_mode }
HttpHeaders { 1 HeaderMap headers, 3 bool end_of_stream }
HttpBody { 1 bytes body, 2 bool end_of_stream }
HttpTrailers { 1 HeaderMap trailers }
ProcessingRequest {
    2 HttpHeaders request_headers, 4 HttpBody request_body, 6 HttpTrailers request_trailers,
    3 HttpHeaders response_headers, 5 HttpBody response_body, 7 HttpTrailers response_trailers,
    8 Metadata metadata_context, 11 ProtocolConfiguration protocol_config
}
BodyMutation { 1 bytes body, 3 HttpBody streamed_response }
CommonResponse { 2 HeaderMutation header_mutation, 3 BodyMutation body_mutation, 5 bool clear_route_cache }
PartResponse { 1 CommonResponse response }
TrailersResponse { 1 HeaderMutation header_mutation }
HttpStatus { 1 int32 code }
ImmediateResponse { 1 HttpStatus status, 2 HeaderMutation headers, 3 bytes body, 5 string details }
ProcessingResponse {
    1 PartResponse request_headers, 3 PartResponse request_body, 5 TrailersResponse request_trailers,
    2 PartResponse response_headers, 4 PartResponse response_body, 6 TrailersResponse response_trailers,
    7 ImmediateResponse immediate_response, 8 Struct dynamic_metadata
}
HealthCheckRequest { 1 string service }
HealthCheckResponse { 1 int32 status }
"""


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="warmroute/picker.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in re.findall(r"(\w+) {([^}]*)}", MESSAGES):
        message = file.message_type.add(name=name)
        for number, kind, field in re.findall(r"(\d+) (\S+) (\w+)", fields):
            described, kind_of_one = message.field.add(name=field, number=int(number)), kind.lstrip("*")
            described.label = Described.LABEL_REPEATED if kind.startswith("*") else Described.LABEL_OPTIONAL
            if kind_of_one in SCALARS:
                described.type = getattr(Described, f"TYPE_{kind_of_one.upper()}")
            else:
                described.type = Described.TYPE_MESSAGE
                described.type_name = STRUCT if kind_of_one == "Struct" else f".{PACKAGE}.{kind_of_one}"
    pool = descriptor_pool.DescriptorPool()  # our own pool: nobody else's messages can have the same names
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    found = {one.name: pool.FindMessageTypeByName(f"{PACKAGE}.{one.name}") for one in file.message_type}
    return {name: message_factory.GetMessageClass(described) for name, described in found.items()}


CLASSES = _classes()
ProcessingRequest: Any = CLASSES["ProcessingRequest"]
ProcessingResponse: Any = CLASSES["ProcessingResponse"]
HealthCheckRequest: Any = CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = CLASSES["HealthCheckResponse"]

LB = "envoy.lb"
ENDPOINT = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_HINT, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
OVERWRITE, APPEND = 2, 0  # HeaderAppendAction
MAX_READ = 1000  # headers of a message; the router takes far fewer

_STATUS = re.compile(rb"[1-5][0-9]{2}")
_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")  # RFC 9110, 5.6.2
_BREAKS = re.compile(rb"[\r\n\0]")

MAX_BESIDE_BYTES = 256 * 1024  # headers and metadata: they may take two bytes in a message, and many more when decoded
BODIES = bytes([4 << 3 | 2]), bytes([5 << 3 | 2])  # how fields 4 and 5 begin


def check_size(raw: bytes) -> None:
    """Raise ValueError if so many bytes follow a body, which gateways put first, or are no part of one."""
    if len(raw) > MAX_BESIDE_BYTES:
        size = 0
        for place, byte in enumerate(raw[1:6] if raw.startswith(BODIES) else b""):  # seven bits each, the lowest first
            size |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                break
        if len(raw) - size > MAX_BESIDE_BYTES:
            raise ValueError(f"the message has more than {MAX_BESIDE_BYTES:,} bytes beside a body; send less")


def read(raw: bytes) -> stream.Message:
    """One of our messages from the bytes of a ProcessingRequest."""
    check_size(raw)
    try:
        message = ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"the message cannot be decoded: {error}") from None
    if message.HasField("request_headers"):
        headers, config = message.request_headers, message.protocol_config
        told = message.HasField("protocol_config")
        return stream.RequestHeaders(
            list(_headers(headers.headers)),
            headers.end_of_stream,
            config.request_body_mode if told else stream.Mode.FULL_DUPLEX_STREAMED,
            config.response_body_mode if told else stream.Mode.FULL_DUPLEX_STREAMED,
            _subset(_metadata(message, SUBSET_HINT, SUBSET)),
        )
    if message.HasField("request_body"):
        return stream.RequestBody(message.request_body.body, message.request_body.end_of_stream)
    if message.HasField("request_trailers"):
        trailers = _headers(message.request_trailers.trailers)
        return stream.RequestTrailers(tuple(dict.fromkeys(name for name, _ in trailers)))
    if message.HasField("response_headers"):
        given = list(_headers(message.response_headers.headers))
        status = next((value for name, value in given if name == b":status"), b"")
        if not _STATUS.fullmatch(status):
            raise ValueError(f"the answer's :status is {status[:20]!r}; it must be a number of three digits")
        served = _metadata(message, LB, SERVED)
        address = served.string_value if served is not None and served.HasField("string_value") else None
        plain = [header for header in given if not header[0].startswith(b":")]
        return stream.ResponseHeaders(int(status), plain, message.response_headers.end_of_stream, address or None)
    if message.HasField("response_body"):
        return stream.ResponseBody(message.response_body.body, message.response_body.end_of_stream)
    if message.HasField("response_trailers"):
        return stream.ResponseTrailers()
    raise ValueError("the message has neither headers nor a body nor trailers")


def _headers(given: Any) -> Iterator[Header]:
    if len(given.headers) > MAX_READ:
        raise ValueError(f"{len(given.headers):,} headers; at most {MAX_READ:,} are taken")
    for header in given.headers:
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


def written(reply: stream.Reply | stream.Refusal) -> bytes:
    """The bytes of a ProcessingResponse."""
    response = ProcessingResponse()
    if isinstance(reply, stream.Refusal):
        immediate = response.immediate_response
        immediate.status.code, immediate.body = reply.status, reply.body
        _mutate(immediate.headers, stream.Mutation(reply.headers))
        return bytes(response.SerializeToString())
    made = getattr(response, reply.about)
    common = made if reply.about.endswith("trailers") else made.response
    common.SetInParent()
    _mutate(common.header_mutation, reply.mutation)
    if reply.part is not None:
        streamed = common.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = reply.part, reply.end
    elif reply.whole is not None:
        common.body_mutation.body = reply.whole
    if reply.endpoint:
        common.clear_route_cache = True
        response.dynamic_metadata.update({LB: {ENDPOINT: reply.endpoint}})
    return bytes(response.SerializeToString())


def _mutate(made: Any, mutation: stream.Mutation) -> None:
    """Change headers; of several with the same name the first one takes the place of those that are there."""
    made.remove_headers.extend(name.decode("latin-1") for name in mutation.removed)
    seen: set[bytes] = set()
    for name, value in mutation.changed:
        option = made.set_headers.add(append_action=APPEND if name in seen else OVERWRITE)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
        seen.add(name)
