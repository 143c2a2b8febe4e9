import gzip
import json
import shutil
import tracemalloc

import pytest
from chrome_trace import chrome_events

from tomat.base.errors import TomatError
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace import load_trace, natural_order
from tomat.perf.profile.trace_breakdown import breakdown_from_trace


def test_the_newest_session_is_read_and_said(tpu_profile, tmp_path, cpu_profile):
    root = tmp_path / "profile"
    shutil.copytree(tpu_profile, root)
    older = root / "plugins" / "profile" / "2025_01_01_00_00_00"
    older.mkdir()
    shutil.copy(cpu_profile, older / "old.xplane.pb")
    trace = load_trace(root)
    assert len(trace.devices) == 4 and "2 sessions found" in trace.notes[0]
    assert load_trace(root, session="2025_01_01_00_00_00").devices[0].device_kind == "cpu"
    with pytest.raises(TomatError, match="no session 'nope'. Sessions there: 2025"):
        load_trace(root, session="nope")
    assert natural_order("run_9") < natural_order("run_10") < natural_order("run_010a")


def test_object_storage(tpu_profile):
    import fsspec

    filesystem = fsspec.filesystem("memory")
    for file in tpu_profile.rglob("*.xplane.pb"):
        filesystem.pipe_file(f"/runs/r1/profiler/{file.relative_to(tpu_profile)}", file.read_bytes())
    assert len(load_trace("memory://runs/r1/profiler").devices) == 4
    with pytest.raises(TomatError, match="r2/profiler: no such file or directory"):
        load_trace("memory://runs/r2/profiler")


def test_places_without_a_trace(tmp_path):
    with pytest.raises(TomatError, match="no such file or directory"):
        load_trace(tmp_path / "absent")
    with pytest.raises(TomatError, match="did the run reach its start step"):
        load_trace(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(TomatError, match="not a trace by its name"):
        load_trace(tmp_path / "notes.md")


def test_a_host_without_a_device_plane(tpu_bytes, tmp_path):
    bare = new_message("XSpace")
    bare.ParseFromString(tpu_bytes(n_steps=2, hostname="coordinator"))
    for plane in [plane for plane in bare.planes if plane.name.startswith("/device")]:
        bare.planes.remove(plane)
    (tmp_path / "a.xplane.pb").write_bytes(bare.SerializeToString())
    with pytest.raises(TomatError, match="no device timeline"):
        load_trace(tmp_path / "a.xplane.pb")
    (tmp_path / "b.xplane.pb").write_bytes(tpu_bytes(n_steps=2))
    trace = load_trace(tmp_path)
    assert len(trace.devices) == 2
    assert any("coordinator: host without a device plane" in n for n in trace.notes)
    assert breakdown_from_trace(trace).n_hosts == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start_unix_ns": 1_800_000_000_000_000_000, "first_device": 2, "hostname": "b"}, "sessions lie .* apart"),
        ({"device_kind": "TPU v5 lite", "first_device": 2, "hostname": "b"}, "their devices differ"),
        ({"hostname": "a"}, "both claim host 'a' and the same devices"),
    ],
)
def test_hosts_of_different_runs_are_refused(tpu_bytes, tmp_path, changes, reason):
    (tmp_path / "a.xplane.pb").write_bytes(tpu_bytes(n_steps=2, hostname="a"))
    (tmp_path / "b.xplane.pb").write_bytes(tpu_bytes(n_steps=2, **changes))
    with pytest.raises(TomatError, match=f"not hosts of one run: .*{reason}"):
        load_trace(tmp_path)


def test_two_files_of_one_host_are_refused_beside_a_third(tpu_bytes, tmp_path):
    (tmp_path / "a.xplane.pb").write_bytes(tpu_bytes(n_steps=2, hostname="a"))
    for name in ("b", "copy of b"):
        (tmp_path / f"{name}.xplane.pb").write_bytes(tpu_bytes(n_steps=2, hostname="b", first_device=2))
    with pytest.raises(TomatError, match="both claim host 'b' and the same devices"):
        load_trace(tmp_path)


def test_a_chrome_trace(tmp_path):
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": chrome_events(1)}).encode()))
    (device,) = load_trace(path).devices
    assert [(k.name, k.program, k.program_id, k.flops) for k in device.kinds] == [
        ("fusion.1", "jit_step", 9, 100.0),
        ("copy.2", "jit_step", 9, None),
    ]
    assert device.ops.duration_ps.tolist() == [6_000_000, 3_500_000]
    assert len(device.steps) == len(device.modules) == 1


def chrome_file(tmp_path, shift_us):
    path = tmp_path / "host.trace.json"
    path.write_text(json.dumps(chrome_events(4, shift_us)))
    return path


def test_a_damaged_chrome_event_is_refused_and_not_left_out(tmp_path):
    path = chrome_file(tmp_path, 0)
    whole = path.read_text()
    for damage in ("-3", "null", "NaN"):
        path.write_text(whole.replace('"dur": 6', f'"dur": {damage}', 1))
        with pytest.raises(TomatError, match="host.trace.json is damaged: an event"):
            load_trace(path)


def test_times_since_1970(tmp_path):
    breakdown = breakdown_from_trace(load_trace(chrome_file(tmp_path, 1_760_000_000_000_000)))
    assert breakdown.step_seconds == pytest.approx(20e-6)
    with pytest.raises(TomatError, match="host.trace.json: its times, .* nanoseconds since 1970"):
        load_trace(chrome_file(tmp_path, 1_760_000_000_000_000_000))


@pytest.mark.parametrize("name", ["bomb.trace.json.gz", "bomb.hlo.pb.gz"])
def test_what_unpacks_to_gigabytes_is_refused(tmp_path, name):
    """300 MB of zeros in 300 kB: refused after the 64 MiB that any file may unpack to."""
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(300):
            file.write(bytes(10**6))
    tracemalloc.start()
    with pytest.raises(TomatError, match="unpack to more than 67,108,864"):
        load_trace(path) if "trace" in name else load_program(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 250 * 2**20
