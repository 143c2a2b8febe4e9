"""Message classes for the two protocol buffers of a profile: XSpace (events) and HloProto (programs).

Neither jax nor xprof ships Python classes for them, and ``jax.profiler.ProfileData`` hides the event metadata: the HLO
modules and, on a TPU, the flops, bytes, category and source line of every operation. So the fields that tomat reads are
declared here and decoded by ``google.protobuf``, which ignores all others.

Field numbers are those of the descriptors embedded in jaxlib 0.11.1 (``xla/service/hlo.proto``,
``xla/xla_data.proto``, ``tsl/profiler/protobuf/xplane.proto``), which ``tests/perf/profile/test_protos.py`` checks.
"""

import functools
from dataclasses import dataclass
from typing import Any

# One line per message, in the order of the .proto files, with `name number type` for each field. `*` after the type
# marks a repeated field, `map<V>` a map from int64 to message V, a capitalised type another message, and `@NAME` a
# member of the one-of NAME (`WhichOneof` tells which member is set).
XPLANE_FIELDS: dict[str, str] = {
    "XSpace": "planes 1 XPlane*, errors 2 string*, warnings 3 string*, hostnames 4 string*",
    "XPlane": (
        "id 1 int64, name 2 string, lines 3 XLine*, event_metadata 4 map<XEventMetadata>, "
        "stat_metadata 5 map<XStatMetadata>, stats 6 XStat*"
    ),
    "XLine": (
        "id 1 int64, display_id 10 int64, name 2 string, display_name 11 string, timestamp_ns 3 int64, "
        "duration_ps 9 int64, events 4 XEvent*"
    ),
    "XEvent": (
        "metadata_id 1 int64, offset_ps 2 int64@data, num_occurrences 5 int64@data, duration_ps 3 int64, stats 4 XStat*"
    ),
    "XStat": (
        "metadata_id 1 int64, double_value 2 double@value, uint64_value 3 uint64@value, int64_value 4 int64@value, "
        "str_value 5 string@value, bytes_value 6 bytes@value, ref_value 7 uint64@value"
    ),
    "XEventMetadata": "id 1 int64, name 2 string, display_name 4 string, metadata 3 bytes, stats 5 XStat*",
    "XStatMetadata": "id 1 int64, name 2 string, description 3 string",
}
HLO_FIELDS: dict[str, str] = {
    "TileProto": "dimensions 1 int64*",
    "LayoutProto": "minor_to_major 1 int64*, tiles 6 TileProto*, memory_space 8 int64",
    "ShapeProto": "element_type 2 int32, dimensions 3 int64*, tuple_shapes 4 ShapeProto*, layout 5 LayoutProto",
    "LiteralProto": (
        "shape 1 ShapeProto, s32s 4 int32*, s64s 5 int64*, u32s 6 uint32*, u64s 7 uint64*, s8s 15 bytes, s16s 17 bytes"
    ),
    "OpMetadata": "op_name 2 string, source_file 3 string, source_line 4 int32, stack_frame_id 15 int32",
    "WindowDimension": (
        "size 1 int64, stride 2 int64, padding_low 3 int64, window_dilation 5 int64, base_dilation 6 int64"
    ),
    "Window": "dimensions 1 WindowDimension*",
    "ConvolutionDimensionNumbers": (
        "kernel_input_feature_dimension 3 int64, kernel_output_feature_dimension 4 int64, "
        "input_spatial_dimensions 11 int64*, output_spatial_dimensions 12 int64*"
    ),
    "DotDimensionNumbers": "lhs_contracting_dimensions 1 int64*, lhs_batch_dimensions 3 int64*",
    "HloInstructionProto": (
        "name 1 string, opcode 2 string, shape 3 ShapeProto, metadata 7 OpMetadata, literal 8 LiteralProto, "
        "parameter_number 9 int64, fusion_kind 11 string, tuple_index 13 int64, dimensions 14 int64*, "
        "window 15 Window, convolution_dimension_numbers 16 ConvolutionDimensionNumbers, feature_group_count 50 int64, "
        "custom_call_target 28 string, dot_dimension_numbers 30 DotDimensionNumbers, comparison_direction 63 string, "
        "id 35 int64, operand_ids 36 int64*, called_computation_ids 38 int64*, backend_config 43 bytes, "
        "replica_groups 49 ReplicaGroup*, use_global_device_ids 71 bool, channel_id 26 int64, "
        "source_target_pairs 52 SourceTarget*, collective_device_list 87 CollectiveDeviceListProto, "
        "iota_collective_device_list 92 IotaReplicaGroupListProto, "
        "mesh_axes_replica_group_list 93 MeshAxesReplicaGroupListProto"
    ),
    "ReplicaGroup": "replica_ids 1 int64*",
    "CollectiveDeviceListProto": "replica_groups 1 ReplicaGroup*",
    "IotaReplicaGroupListProto": (
        "num_replica_groups 1 int64, num_devices_per_group 2 int64, iota_reshape_dims 3 int64*, "
        "iota_transpose_perm 4 int32*"
    ),
    "MeshAxis": "name 1 string, size 2 int64",
    "IotaTransform": "reshape_dims 1 int64*, transpose_perm 2 int64*",
    "MeshProto": "axes 1 MeshAxis*, device_ids 2 int64*, iota_transform 3 IotaTransform",
    "SubAxis": "pre_size 1 int64, size 2 int64",
    "AxisRefProto": "mesh_axis_index 1 int64, sub_axis_info 2 SubAxis",
    "MeshAxesReplicaGroupListProto": "mesh 1 MeshProto, axes 2 AxisRefProto*",
    "SourceTarget": "source 1 int64, target 2 int64",
    "ComputationDevice": "replica_device_ids 1 int64*",
    "DeviceAssignmentProto": (
        "replica_count 1 int32, computation_count 2 int32, computation_devices 3 ComputationDevice*"
    ),
    "InstructionSequence": "instruction_ids 1 int64*",
    "HloScheduleProto": "sequences 1 map<InstructionSequence>",
    "HloComputationProto": "name 1 string, instructions 2 HloInstructionProto*, id 5 int64, root_id 6 int64",
    "FileLocation": "file_name_id 1 int32, function_name_id 2 int32, line 3 int32",
    "StackFrame": "file_location_id 1 int32, parent_frame_id 2 int32",
    "StackFrameIndexProto": (
        "file_names 1 string*, function_names 2 string*, file_locations 3 FileLocation*, stack_frames 4 StackFrame*"
    ),
    "HloModuleProto": (
        "name 1 string, computations 3 HloComputationProto*, id 5 int64, entry_computation_id 6 int64, "
        "schedule 7 HloScheduleProto, device_assignment 15 DeviceAssignmentProto, "
        "stack_frame_index 17 StackFrameIndexProto"
    ),
    "Assigned": "logical_buffer_id 1 int64, offset 2 int64, size 3 int64",
    "BufferAllocationProto": (
        "index 1 int64, size 2 int64, is_thread_local 3 bool, is_entry_computation_parameter 5 bool, "
        "maybe_live_out 7 bool, color 8 int64, assigned 9 Assigned*, is_constant 12 bool, "
        "is_parameter_aliased_with_output 13 bool"
    ),
    "Location": "instruction_name 2 string, shape_index 3 int64*, instruction_id 4 int64",
    "LogicalBufferProto": "id 1 int64, size 2 int64, defined_at 3 Location, color 4 int64",
    "Event": "kind 1 int32, buffer_id 2 int64, share_with_canonical_id 5 int64",
    "HeapSimulatorTrace": "events 1 Event*",
    "BufferAssignmentProto": (
        "logical_buffers 1 LogicalBufferProto*, buffer_allocations 3 BufferAllocationProto*, "
        "heap_simulator_traces 4 HeapSimulatorTrace*"
    ),
    "HloProto": "hlo_module 1 HloModuleProto, buffer_assignment 3 BufferAssignmentProto",
}


@dataclass(frozen=True)
class Field:
    """One declared field: name, number, scalar or message type, if it repeats or is a map, its one-of ("": none)."""

    name: str
    number: int
    type: str
    repeated: bool
    is_map: bool
    oneof: str


def parse_fields(line: str) -> list[Field]:
    found = []
    for item in line.split(","):
        name, number, kind = item.split()
        kind, _, oneof = kind.partition("@")
        bare = kind.removeprefix("map<").rstrip(">*")
        found.append(Field(name, int(number), bare, kind.endswith("*"), kind.startswith("map<"), oneof))
    return found


@functools.cache
def _message_classes() -> dict[str, Any]:
    """The message classes of both tables by message name, built once per process."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tomat/perf/profile.proto", package="tomat", syntax="proto3")
    for message_name, line in (XPLANE_FIELDS | HLO_FIELDS).items():
        message = file.message_type.add(name=message_name)
        for field in parse_fields(line):
            added = message.field.add(name=field.name, number=field.number)
            added.label = proto.LABEL_REPEATED if field.repeated or field.is_map else proto.LABEL_OPTIONAL
            if field.oneof:  # no message has more than one
                if not message.oneof_decl:
                    message.oneof_decl.add(name=field.oneof)
                added.oneof_index = 0
            if field.is_map:
                entry = message.nested_type.add(name="".join(p.title() for p in field.name.split("_")) + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=proto.TYPE_INT64, label=proto.LABEL_OPTIONAL)
                value_type = f".tomat.{field.type}"
                entry.field.add(name="value", number=2, type_name=value_type, label=proto.LABEL_OPTIONAL)
                added.type, added.type_name = proto.TYPE_MESSAGE, f".tomat.{message_name}.{entry.name}"
            elif field.type[0].isupper():
                added.type, added.type_name = proto.TYPE_MESSAGE, f".tomat.{field.type}"
            else:
                added.type = getattr(proto, f"TYPE_{field.type.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tomat.{message.name}"))
        for message in file.message_type
    }


def new_message(name: str) -> Any:
    """An empty message of the named type (`XSpace`, `HloProto`, `HloModuleProto`, ...)."""
    return _message_classes()[name]()
