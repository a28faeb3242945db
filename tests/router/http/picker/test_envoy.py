"""Messages of external processing have the numbers and types that Envoy's published ones have (xds-protos)."""

import ast
import os
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from router.http.picker.wire import CLASSES, SCALARS

ENVOY = Path(__file__).parents[4] / "build" / "k8s" / "lib"  # `make tools` installs it there
FILES = ("service/ext_proc/v3/external_processor", "config/core/v3/base", "type/v3/http_status")
# Several of theirs are one of ours, since they have the same fields as far as we read them.
THEIRS = {
    "Namespace": ("FilterMetadataEntry",),
    "PartResponse": ("HeadersResponse", "BodyResponse"),
    "HttpBody": ("HttpBody", "StreamedBodyResponse"),
}
OF_HEALTH = ("HealthCheckRequest", "HealthCheckResponse")  # of gRPC itself


def published() -> dict[str, DescriptorProto]:
    found: dict[str, DescriptorProto] = {}
    for name in FILES:
        text = next(ENVOY.glob(f"*/site-packages/envoy/{name}_pb2.py")).read_text()
        file = FileDescriptorProto.FromString(ast.literal_eval(re.findall(r"AddSerializedFile\((b.*)\)\n", text)[0]))
        for message in file.message_type:
            found |= {one.name: one for one in (message, *message.nested_type)}
    return found


def kind(field: FieldDescriptorProto) -> str:
    name = str(FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()
    return "int32" if name == "enum" else name


@pytest.mark.skipif(not ENVOY.is_dir() and not os.environ.get("CI"), reason="make tools installs xds-protos")
def test_our_messages_are_envoys() -> None:
    theirs = published()
    for name, ours in CLASSES.items():
        for other in () if name in OF_HEALTH else THEIRS.get(name, (name,)):
            fields = {field.number: field for field in theirs[other].field}
            described = DescriptorProto()
            ours.DESCRIPTOR.CopyToProto(described)
            for mine in described.field:
                found = fields[mine.number]
                assert (found.name, found.label, kind(found)) == (mine.name, mine.label, kind(mine)), (
                    f"{other}: {found}"
                )
                if kind(mine) not in SCALARS:
                    target, own = (one.type_name.rpartition(".")[2] for one in (found, mine))
                    assert target in (own, *THEIRS.get(own, ())), f"{other}.{found.name}"
