import pytest

from tomat.base.errors import TomatError
from tomat.perf.profile.planes import GpuExecutions
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace import read_xplane_bytes
from tomat.perf.profile.trace_data import ModuleRun, with_program_of_run


def read(data: bytes):
    return read_xplane_bytes(data, "x.xplane.pb", "x")


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


def test_a_command_buffer_without_hlo(gpu_profile):
    """Its kernels are told apart by their own names."""
    space = new_message("XSpace")
    space.ParseFromString(gpu_profile.read_bytes())
    space.planes.remove(next(plane for plane in space.planes if plane.name == "/host:metadata"))
    names = {kind.name for kind in read(space.SerializeToString()).devices[0].kinds}
    assert "loop_add_fusion_4" in names and not [name for name in names if name.startswith("command_buffer")]


def test_a_device_in_the_form_of_amd(gpu_profile):
    """A real NVIDIA trace with the stats and the names of kernels that AMD's profiler writes."""
    space = new_message("XSpace")
    space.ParseFromString(gpu_profile.read_bytes())
    plane = next(plane for plane in space.planes if plane.name.startswith("/device:GPU"))
    names = {key: value.name for key, value in plane.stat_metadata.items()}
    for stat in [stat for stat in plane.stats if names[stat.metadata_id] == "gpu_device_name"]:
        plane.stats.remove(stat)
    next(stat for stat in plane.stats if names[stat.metadata_id] == "device_vendor").str_value = "AMD"
    for metadata in plane.event_metadata.values():
        metadata.name += ".kd"
    (device,), (plain,) = read(space.SerializeToString()).devices, read(gpu_profile.read_bytes()).devices
    assert device.device_kind == "AMD GPU, compute capability 9.0"
    assert [kind.name.removesuffix(".kd") for kind in device.kinds] == [kind.name for kind in plain.kinds]


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
        plane.lines.add(name="XLA Ops", timestamp_ns=-1)  # empty
    assert [device.ops.start_ps.tolist() for device in read(space.SerializeToString()).devices] == starts


def test_damaged_hlo_is_a_warning_and_not_the_end(tpu_bytes):
    host = read(tpu_bytes(hlo_proto=b"\x0a\xff\xff\xff not a module"))
    assert len(host.devices) == 2 and not host.programs
    assert any("the HLO of jit_step cannot be read" in w for w in host.warnings)


LAUNCHES = "[0] GpuExecutable::ExecuteThunks"


def launched(*events):
    """Of (thread, label, correlation_id, start, end)."""
    found = GpuExecutions()
    for event in events:
        found.add(*event)
    return found


def test_a_kernel_is_of_the_execution_whose_thread_launched_it():
    found = launched(
        (0, LAUNCHES, 0, 100, 200),
        (0, "cuGraphLaunch (CudaGraph:1)", 7, 110, 120),
        (0, "cuLaunchKernel", 8, 150, 160),
        (0, LAUNCHES, 0, 300, 400),
        (0, "cuLaunchKernel", 9, 310, 320),
        (1, "[1] GpuExecutable::ExecuteThunks", 0, 90, 500),  # another device's, at the same time
        (1, "cuLaunchKernel", 10, 350, 360),
        # What no execution launched: after one, before any, and on another thread.
        (0, "MemcpyH2D", 3, 250, 260),
        (0, "MemcpyH2D", 4, 50, 60),
        (2, "MemcpyD2H", 5, 150, 160),
    )
    kernels = [
        (9, "jit_step", 5, 4000, 4100),
        (7, "jit_step", 5, 1000, 1100),
        (7, "jit_step", 5, 1200, 1300),  # one launch of many kernels
        (8, "jit_step", 5, 1400, 1500),
        *((identity, "jit_step", 5, 0, 1) for identity in (3, 4, 5)),
        (8, "", 0, 6, 7),
    ]
    assert found.of_kernels(kernels) == [ModuleRun("jit_step", 5, 1000, 1500), ModuleRun("jit_step", 5, 4000, 4100)]
    assert found.of_kernels([(10, "jit_step", 5, 2000, 2100)]) == [ModuleRun("jit_step", 5, 2000, 2100)]


def test_launches_on_lines_of_their_own_go_to_the_thread_around_them():
    """As AMD's profiler writes them: two devices, each with a thread that annotates and a line of launches."""
    begun = [(t, start + 5 * t) for t in (0, 1) for start in (100, 200)]
    threads = [(t, "GpuExecutable::ExecuteThunks", 0, start, start + 40) for t, start in begun]
    nested = [(t, "jit_step:XLA GPU module", 0, start + 2, start + 38) for t, start in begun]
    launches = [
        (10 + t, "hipModuleLaunchKernel", 100 * t + i, start + 5 * t + 1 + 12 * j, start + 5 * t + 3 + 12 * j)
        for t in (0, 1) for i, (start, j) in enumerate([(100, 0), (100, 3), (200, 0), (200, 3)], start=1)
    ]  # fmt: skip
    elsewhere = [(20, "hipMemcpyDtoDAsync", 900, 300, 310)]
    found = launched(*threads, *nested, *launches, *elsewhere)
    for t in (0, 1):
        kernels = [(100 * t + i, "jit_step", 5, 1000 * i, 1000 * i + 500) for i in (1, 2, 3, 4)]
        expected = [ModuleRun("jit_step", 5, 1000, 2500), ModuleRun("jit_step", 5, 3000, 4500)]
        assert found.of_kernels([*kernels, (900, "jit_step", 5, 9000, 9100)]) == expected
