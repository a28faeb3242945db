"""The messages of Envoy's external processing, as far as a picker reads and writes them (envoy.service.ext_proc.v3).

Numbers and types are Envoy's; other fields of a message are skipped. Packages that hold all of Envoy's messages put
folders such as `opentelemetry` and `google` into site-packages, where they hide those of others.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Described
from google.protobuf.descriptor_pb2 import FileDescriptorProto

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE = "grpc.health.v1.Health"
PACKAGE = "warmroute.picker"
STRUCT = "google.protobuf.Struct"

# By message: its fields as (number, type); `*` marks those that are repeated.
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
    "PartResponse": {"response": (1, "CommonResponse")},  # of headers or a body
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


def _file() -> FileDescriptorProto:
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
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()  # of our own: nobody else's messages can have the same names
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(_file())
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _classes()
ProcessingRequest: Any = CLASSES["ProcessingRequest"]
ProcessingResponse: Any = CLASSES["ProcessingResponse"]
HealthCheckRequest: Any = CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = CLASSES["HealthCheckResponse"]
