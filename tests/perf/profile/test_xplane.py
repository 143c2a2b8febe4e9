import pytest

from tomat.base.errors import TomatError
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace import read_xplane_bytes
from tomat.perf.profile.trace_data import with_program_of_run


def read(data: bytes):
    return read_xplane_bytes(data, "x.xplane.pb", "x")


def test_a_tpu_host(tpu_bytes, v6e_program):
    host = read(tpu_bytes(hostname="h7"))
    assert host.host == "h7" and [d.name for d in host.devices] == ["/device:TPU:0", "/device:TPU:1"]
    device = host.devices[0]
    assert device.device_kind == "TPU v6 Lite"
    assert len(device.steps) == len(device.modules) == 4
    assert device.modules[0].program_id == v6e_program.program_id
    assert set(host.programs) == {v6e_program.program_id}
    names = {k.name for k in device.kinds}
    assert names <= set(v6e_program.by_name) and "splash_mha_dq_no_residuals.1" in names
    assert len(device.async_ops) > 0


def test_program_ids_are_64_bit_fingerprints(v6e_program, tpu_bytes):
    """A float or a sign would lose the program; so would an operation that carries no id."""
    from dataclasses import replace

    fingerprint = 2**63 + 12345678901
    space = new_message("XSpace")
    space.ParseFromString(tpu_bytes(n_devices=1))
    old = v6e_program.program_id
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        for metadata in plane.event_metadata.values():
            metadata.name = metadata.name.replace(f"({old})", f"({fingerprint})")
            for stat in metadata.stats:
                if names[stat.metadata_id] == "program_id":
                    stat.int64_value = fingerprint - 2**64
    host = read(space.SerializeToString())
    assert set(host.programs) == {fingerprint}
    assert {(k.program, k.program_id) for k in host.devices[0].kinds} == {("jit_step", fingerprint)}
    nameless = [replace(k, program="", program_id=0) for k in host.devices[0].kinds]
    device = host.devices[0]
    assert with_program_of_run(nameless, device.ops, device.modules)[0].program_id == fingerprint


def test_a_cpu_host(cpu_profile):
    host = read(cpu_profile.read_bytes())
    assert [d.name for d in host.devices] == ["/host:CPU:0", "/host:CPU:1"]
    assert [m.number for m in host.host_steps] == list(range(6))
    for device in host.devices:
        assert len(device.modules) == 6
        assert {k.program for k in device.kinds} == {"jit_step"}


def test_a_gpu_host_built_after_the_schema():
    """Streams of a GPU plane: kernels carry their HLO operation as event stats, copies carry none."""
    space = new_message("XSpace")
    plane = space.planes.add(name="/device:GPU:0")
    for number, name in enumerate(["hlo_op", "hlo_module", "dot.3", "jit_step", "device_type_string"], start=1):
        plane.stat_metadata[number].name = name
    plane.stats.add(metadata_id=5, str_value="NVIDIA H100 80GB HBM3")
    for number, name in enumerate(["sm90_xmma_gemm_bf16", "MemcpyD2D", "not a stream"], start=1):
        plane.event_metadata[number].id, plane.event_metadata[number].name = number, name
    compute = plane.lines.add(id=7, name="Stream #7(Compute)", timestamp_ns=1)
    kernel = compute.events.add(metadata_id=1, offset_ps=0, duration_ps=500)
    kernel.stats.add(metadata_id=1, ref_value=3)
    kernel.stats.add(metadata_id=2, ref_value=4)
    plane.lines.add(id=8, name="Stream #8(Memcpy)", timestamp_ns=1).events.add(
        metadata_id=2, offset_ps=100, duration_ps=50
    )
    plane.lines.add(id=9, name="XLA Ops", timestamp_ns=1).events.add(metadata_id=3, offset_ps=0, duration_ps=500)
    device = read(space.SerializeToString()).devices[0]
    assert device.device_kind == "NVIDIA H100 80GB HBM3"
    assert [(k.name, k.program) for k in device.kinds] == [("dot.3", "jit_step"), ("MemcpyD2D", "")]
    assert sorted(device.ops.duration_ps.tolist()) == [50, 500]


def test_kernels_of_a_gpu_that_no_thread_is_known_to_have_launched(gpu_profile):
    """Without the host's part the kernels remain, and no execution is made up."""
    space = new_message("XSpace")
    space.ParseFromString(gpu_profile.read_bytes())
    host = next(plane for plane in space.planes if plane.name == "/host:CPU")
    space.planes.remove(host)
    (device,) = read(space.SerializeToString()).devices
    assert device.modules == [] and len(device.ops) > 3_000


def test_a_command_buffer_without_hlo(gpu_profile):
    """Its kernels are told apart by their own names."""
    space = new_message("XSpace")
    space.ParseFromString(gpu_profile.read_bytes())
    space.planes.remove(next(plane for plane in space.planes if plane.name == "/host:metadata"))
    names = {kind.name for kind in read(space.SerializeToString()).devices[0].kinds}
    assert "loop_add_fusion_4" in names and not [name for name in names if name.startswith("command_buffer")]


def test_empty_truncated_and_foreign_files(tpu_bytes):
    with pytest.raises(TomatError, match="empty file"):
        read(b"")
    data = tpu_bytes(n_steps=2)
    for cut in (len(data) // 3, len(data) // 2, len(data) - 7):
        with pytest.raises(TomatError, match="truncated"):
            read(data[:cut])
    with pytest.raises(TomatError, match="do not decode as an XSpace"):
        read(b"<html>not a profile</html>" * 100)
    with pytest.raises(TomatError, match="without planes"):
        read(b"\x22\x02h1")  # an XSpace that holds a hostname only


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda event: setattr(event, "metadata_id", 10**9), "another schema than that of jax 0.11.1"),
        (lambda event: setattr(event, "duration_ps", -1), "a negative duration"),
        (lambda event: setattr(event, "offset_ps", 2**63 - 1), "more than a day from the others"),
        (lambda event: setattr(event, "num_occurrences", 3), "sums over many"),
    ],
)
def test_a_damaged_event_is_refused(tpu_bytes, damage, reason):
    space = new_message("XSpace")
    space.ParseFromString(tpu_bytes(n_steps=2))
    device = next(plane for plane in space.planes if plane.name == "/device:TPU:1")
    damage(next(line for line in device.lines if line.name == "XLA Ops").events[7])
    with pytest.raises(TomatError, match=f"x.xplane.pb, /device:TPU:1 is damaged: .*{reason}"):
        read(space.SerializeToString())


def test_times_since_1970(tpu_bytes):
    """Nanoseconds since 1970, as the format's own description has them."""
    space = new_message("XSpace")
    space.ParseFromString(tpu_bytes(n_steps=2))
    starts = [device.ops.start_ps.tolist() for device in read(space.SerializeToString()).devices]
    for plane in space.planes:
        for line in plane.lines:
            line.timestamp_ns += 1_760_000_000_000_000_000
    assert [device.ops.start_ps.tolist() for device in read(space.SerializeToString()).devices] == starts


def test_damaged_hlo_is_a_warning_and_not_the_end(tpu_bytes):
    host = read(tpu_bytes(hlo_proto=b"\x0a\xff\xff\xff not a module"))
    assert len(host.devices) == 2 and not host.programs
    assert any("the HLO of jit_step cannot be read" in w for w in host.warnings)
