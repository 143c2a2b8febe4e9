import mmap
from pathlib import Path

import jaxlib
import pytest
from google.protobuf import descriptor_pb2

from tomat.perf.profile.protos import HLO_FIELDS, XPLANE_FIELDS, parse_fields

SCALARS = {1: "double", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}


def embedded_descriptors(name: str) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of a .proto file that jaxlib's shared library carries, found by its name field."""
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    key = b"\x0a" + bytes([len(name)]) + name.encode()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(key)
        while at >= 0:
            end = end_of_message(data, at)
            found = descriptor_pb2.FileDescriptorProto.FromString(data[at:end])
            if found.message_type:
                return found
            at = data.find(key, at + 1)
    pytest.fail(f"{library.name} carries no descriptor of {name}")


def end_of_message(data: mmap.mmap, start: int) -> int:
    """Walk the fields of a FileDescriptorProto from `start` until a tag it cannot have."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
            if byte < 128:
                return value, at

    at = start
    while True:
        tag, after = varint(at)
        known = tag >> 3 in range(1, 15) and tag & 7 in (0, 2)
        if not known or (tag >> 3 == 1 and at != start):
            return at
        length, after = varint(after)
        at = after + length if tag & 7 == 2 else after


def all_messages(file: descriptor_pb2.FileDescriptorProto) -> dict[str, descriptor_pb2.DescriptorProto]:
    found = {}
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        found[message.name] = message
        pending += message.nested_type
    return found


@pytest.mark.parametrize(
    ("files", "tables"),
    [
        (["tsl/profiler/protobuf/xplane.proto"], XPLANE_FIELDS),
        (["xla/service/hlo.proto", "xla/xla_data.proto"], HLO_FIELDS),
    ],
)
def test_declared_fields_are_those_of_the_installed_jaxlib(files, tables):
    messages = {}
    for name in files:
        messages |= all_messages(embedded_descriptors(name))
    for message_name, line in tables.items():
        real = {f.name: f for f in messages[message_name].field}
        for field in parse_fields(line):
            theirs = real[field.name]
            assert theirs.number == field.number, (message_name, field.name)
            assert (theirs.label == theirs.LABEL_REPEATED) == (field.repeated or field.is_map)
            if not field.is_map:
                # enums are declared as int32, which has the same wire format
                expected = "int32" if theirs.type == theirs.TYPE_ENUM else SCALARS.get(theirs.type)
                assert (expected or theirs.type_name.rsplit(".", 1)[-1]) == field.type, (message_name, field.name)
