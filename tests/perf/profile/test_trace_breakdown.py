import json

import numpy as np
import pytest
from hlo_text import program_of
from trace_builder import build_xspace, serialise_program

from tomat.app.cli import main as tomat
from tomat.perf.profile.breakdown import Breakdown, Roofs
from tomat.perf.profile.categories import Category, Direction
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_kernels import executed_kernels
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace import load_trace, merge_hosts, read_xplane_bytes
from tomat.perf.profile.trace_breakdown import breakdown_from_trace
from tomat.report.pages.report import setup_facts


@pytest.fixture(scope="module")
def tpu(tpu_profile):
    return breakdown_from_trace(load_trace(tpu_profile))


@pytest.fixture(scope="module")
def cpu(cpu_profile):
    return breakdown_from_trace(load_trace(cpu_profile))


@pytest.fixture(scope="module")
def gpu(gpu_profile):
    return breakdown_from_trace(load_trace(gpu_profile))


@pytest.mark.parametrize("name", ["tpu", "cpu", "gpu"])
def test_shares_sum_to_the_step(name, request):
    breakdown = request.getfixturevalue(name)
    assert sum(r.share for r in breakdown.categories) == pytest.approx(1.0, abs=1e-12)
    assert sum(r.share for r in breakdown.parts) == pytest.approx(1.0, abs=1e-12)
    assert breakdown.step_seconds == pytest.approx(np.mean(breakdown.step_times_seconds), rel=1e-9)


def test_a_tpu_step(tpu, v6e_program):
    """Everything the builder put in comes out: times, occurrences, skew, idle time."""
    assert (tpu.n_devices, tpu.n_hosts, tpu.n_steps) == (4, 2, 3)
    assert tpu.roofs.peak_flops_per_second == 918e12
    rows = {r.name: r for r in tpu.categories}
    # device n is 1 + 0.01 n slower: 1.015 on average. Two forward kernels of 20 us, 4 layers, in each.
    assert rows["attention forward"].seconds == pytest.approx(8 * 20e-6 * 1.015, rel=1e-6)
    assert rows["attention forward"].cycles == pytest.approx(8 * 20e-6 * 1.015 * 1.75e9, rel=1e-6)
    assert rows["idle between steps"].seconds == pytest.approx(50e-6, rel=1e-6)
    kernels = [k for k in executed_kernels(v6e_program) if k.instruction.opcode != "while"]
    ops = {o.name: o for o in tpu.ops}
    # the builder runs a loop's condition once more than its body, as the machine does
    for kernel in kernels:
        assert ops[kernel.instruction.name].occurrences == pytest.approx(kernel.executions)
    assert tpu.step_classes[0].name == "steady" and tpu.step_classes[0].count == 12
    assert tpu.gaps[0].seconds == pytest.approx(50e-6) and tpu.gaps[0].occurrences == 1
    assert any("fastest" in note for note in tpu.notes)
    assert any("flops unknown for custom calls" in note for note in tpu.notes)


def test_a_real_gpu_step(gpu):
    """Its kernels are launched as CUDA graphs, its steps while others run."""
    rows = {r.name: r for r in gpu.categories}
    assert {"attention forward", "attention backward", "matmul", "loss", "optimizer", "embedding"} <= set(rows)
    assert (gpu.roofs.device_kind, gpu.n_devices, gpu.n_steps) == ("NVIDIA H200", 1, 3)
    assert gpu.roofs.peak_flops_per_second == 989.4e12
    ops = {o.name: o for o in gpu.ops}
    assert not [name for name in ops if name.startswith("command_buffer")]
    # Once in each of 6 layers.
    assert ops["loop_add_fusion.4"].occurrences == 6 and ops["loop_add_fusion.4"].source.startswith("levanter/")
    assert ops["loop_add_fusion.4"].category == Category.ATTENTION_BACKWARD
    # cuBLAS's kernels name no instruction; their order tells it. 8 sequences of 2,048 tokens of the 30M: projections
    # three times, the logits of 16,384 bins, plain attention.
    tokens, width, ffn, layers = 8 * 2048, 512, 2048, 6
    expected = 6 * tokens * (layers * (4 * width**2 + 3 * width * ffn + 2 * 2048 * width) + width * 16384)
    assert sum(o.flops or 0.0 for o in gpu.ops) == pytest.approx(expected, rel=0.01)
    assert not [name for name in ops if name.startswith("nvjet")]
    assert rows["idle between steps"].share < 0.01
    assert any("a step is one execution of jit__train_step" in note for note in gpu.notes)
    assert any("while others ran" in note for note in gpu.notes)


def test_a_real_cpu_step(cpu):
    rows = {r.name: r for r in cpu.categories}
    assert {"attention forward", "attention backward", "matmul", "loss", "optimizer", "embedding"} <= set(rows)
    assert (cpu.n_devices, cpu.n_steps) == (2, 5)
    assert rows["collectives, exposed"].bound == "communication"
    recomputed = [o for o in cpu.ops if o.direction == Direction.RECOMPUTE and o.category == Category.MATMUL]
    assert recomputed  # gradient checkpointing is on
    assert cpu.memory_bytes["parameter"] > 0
    sourced = sum(o.seconds for o in cpu.ops if o.source.startswith("levanter/"))
    assert sourced > 0.5 * sum(o.seconds for o in cpu.ops if o.program)
    # forward, recomputed forward without the down projections, backward twice; two sequences a device
    tokens, hidden, ffn, vocab = 2 * 64, 64, 128, 128
    layer = 2 * tokens * (4 * hidden * hidden + 3 * hidden * ffn)
    expected = 2 * (4 * layer - 2 * tokens * hidden * ffn) + 6 * tokens * hidden * vocab
    found = (rows["matmul"].flops or 0) + (rows["loss"].flops or 0)
    assert found == pytest.approx(expected, rel=0.05)


def traced(folder, data: bytes) -> Breakdown:
    (folder / "x.xplane.pb").write_bytes(data)
    return breakdown_from_trace(load_trace(folder / "x.xplane.pb"))


def test_without_hlo_the_events_own_stats_decide(tpu_bytes, tmp_path):
    blind, seeing = traced(tmp_path, tpu_bytes(hlo_proto=None, n_devices=1)), traced(tmp_path, tpu_bytes(n_devices=1))
    assert any("holds no HLO" in n for n in blind.notes)
    assert blind.step_seconds == pytest.approx(seeing.step_seconds)
    a, b = ({r.name: r.seconds for r in x.categories} for x in (blind, seeing))
    for name in ("idle between steps", "collectives, exposed"):
        assert a[name] == pytest.approx(b[name], rel=0.001), name
    # A fusion that only moves data cannot be told from one that computes: it stays with the part it serves.
    for name in ("attention forward", "attention backward", "matmul", "loss"):
        assert b[name] <= a[name] * 1.001 < 1.4 * b[name], name
    assert a["copies and relayout"] < b["copies and relayout"]
    assert a.get("unattributed", 0.0) < 0.01 * blind.step_seconds


def test_a_chrome_trace_of_the_same_run_has_the_same_step(cpu_profile, cpu, tmp_path):
    """JAX's own trace.json holds the same events; rebuilt here from the xplane to keep one fixture."""
    host = read_xplane_bytes(cpu_profile.read_bytes(), "x", "x")
    device = host.devices[0]
    events = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/host:CPU"}}]
    ops = device.ops
    for kind, start, duration, line in zip(ops.kind, ops.start_ps, ops.duration_ps, ops.line, strict=True):
        named = device.kinds[kind]
        args = {"hlo_op": named.name, "hlo_module": named.program}
        row = {"ph": "X", "pid": 1, "tid": int(line), "name": named.name, "args": args}
        events.append(row | {"ts": float(start) / 1e6, "dur": float(duration) / 1e6})
    for mark in host.host_steps:
        row = {"ph": "X", "pid": 1, "tid": 99, "name": "train", "args": {"step_num": str(mark.number)}}
        events.append(row | {"ts": mark.start_ps / 1e6, "dur": (mark.end_ps - mark.start_ps) / 1e6})
    path = tmp_path / "host.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    chrome = breakdown_from_trace(load_trace(path))
    assert chrome.step_seconds == pytest.approx(cpu.step_seconds, rel=1e-6)
    # Without HLO the fusions' insides are unknown, the collectives and loops are not.
    found, known = ({r.name: r.occurrences for r in one.categories} for one in (chrome, cpu))
    assert found["collectives, exposed"] == pytest.approx(known["collectives, exposed"])


def with_stats(data: bytes, **stats: float | str) -> bytes:
    """The built trace with other stats on its device's plane."""
    space = new_message("XSpace")
    space.ParseFromString(data)
    plane = next(p for p in space.planes if p.name.startswith("/device"))
    del plane.stats[:]
    for name, value in stats.items():
        identity = max(plane.stat_metadata) + 1
        plane.stat_metadata[identity].id, plane.stat_metadata[identity].name = identity, name
        stat = plane.stats.add(metadata_id=identity)
        setattr(stat, "str_value" if isinstance(value, str) else "double_value", value)
    return space.SerializeToString()


PEAKS = {"peak_teraflops_per_second": 1028.75, "peak_hbm_bw_gigabytes_per_second": 3686.156}
"""What libtpu writes of a core of TPU7x."""


@pytest.mark.parametrize(("name", "stated"), [("TPU v6 Lite", {}), ("TPU V6E", PEAKS)])
def test_a_chip_of_the_table_has_its_peaks(name, stated, tpu_bytes, tmp_path):
    roofs = traced(tmp_path, with_stats(tpu_bytes(n_devices=1), device_type_string=name, **stated)).roofs
    assert roofs == Roofs.of_device_kind("TPU v6 lite") and roofs.peak_flops_per_second == 918e12
    assert not roofs.stated_by_trace


def test_a_chip_that_is_not_in_the_table_has_the_peaks_that_its_trace_states(tpu_bytes, tmp_path, capsys):
    found = traced(tmp_path, with_stats(tpu_bytes(n_devices=1), device_type_string="TPU v9 Mega", **PEAKS))
    assert found.roofs.stated_by_trace and found.roofs.device_kind == "TPU v9 Mega"
    assert found.roofs.peak_flops_per_second == pytest.approx(1028.75e12)
    assert found.roofs.peak_hbm_bytes_per_second == pytest.approx(3686.156e9)
    matmul = {row.name: row for row in found.categories}["matmul"]
    assert matmul.flops_fraction == pytest.approx((matmul.flops or 0) / matmul.seconds / 1028.75e12)
    assert any("TPU v9 Mega is not in the table" in note and "the trace states" in note for note in found.notes)
    assert Breakdown.from_dict(found.to_dict()).roofs == found.roofs
    assert "as the trace states them" in str(setup_facts(RECORD, found))
    assert tomat(["profile", str(tmp_path / "x.xplane.pb"), "--top", "0"]) == 0
    assert "1.03 PFLOP/s and 3.69 TB/s, are those that the trace states" in " ".join(capsys.readouterr().out.split())


def test_a_chip_of_which_nothing_is_known_has_no_peaks(tpu_bytes, tmp_path):
    with pytest.warns(UserWarning, match="'TPU v9 Micro'.*no MFU"):
        found = traced(tmp_path, with_stats(tpu_bytes(n_devices=1), device_type_string="TPU v9 Micro"))
    assert found.roofs == Roofs("TPU v9 Micro") and "not in the table of chips" in str(setup_facts(RECORD, found))


FACTS = ("kind", "commit", "date", "config_hash", "slice", "batch_sequences", "sequence_tokens")
RECORD = dict.fromkeys(FACTS, "measured")


def test_two_compiles_of_one_step_keep_their_operations():
    array = "bf16[4096,4096]{1,0}"

    def compiled(second, number):
        dot = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        program = program_of(
            f"  a = {array} parameter(0)\n  dot.1 = {array} dot(a, a), {dot}\n"
            f"  x.2 = {array} {second.format(dot=dot)}\n"
            f"  ROOT y.3 = {array} tanh(x.2)"
        )
        program.module.name, program.module.id = "jit__train_step", number
        return HloProgram(program.module, number)

    def space_of(program, steps):
        space, seconds = new_message("XSpace"), {"dot.1": 1e-3, "x.2": 1e-3, "y.3": 1e-4}
        data = build_xspace(program, "TPU v6 Lite", lambda i: seconds[i.name], steps, serialise_program(program))
        space.ParseFromString(data)
        return space, *(next(p for p in space.planes if p.name == name) for name in ("/device:TPU:0", "/host:metadata"))

    space, device, programs = space_of(compiled("copy(dot.1)", 222), 3)
    _, more, others = space_of(compiled("dot(dot.1, a), {dot}", 111), 3)
    shift = max(e.offset_ps + e.duration_ps for line in device.lines for e in line.events) + 50_000_000
    for key, value in others.event_metadata.items():
        programs.event_metadata[key].CopyFrom(value)
    for key, value in more.event_metadata.items():
        device.event_metadata[1000 + key].CopyFrom(value)
    for line, into in zip(more.lines, device.lines, strict=True):
        for event in line.events:
            into.events.add().CopyFrom(event)
            into.events[-1].metadata_id += 1000
            into.events[-1].offset_ps += shift
    step = breakdown_from_trace(merge_hosts("t", [read_xplane_bytes(space.SerializeToString(), "t", "h")]))
    # The last step is left out: three with one product, two with two.
    assert step.n_steps == 5
    rows = {row.name: row.seconds for row in step.categories}
    assert rows["matmul"] == pytest.approx((3 * 1e-3 + 2 * 2e-3) / 5)
    assert rows["copies and relayout"] == pytest.approx(3 * 1e-3 / 5)
    assert sum(op.flops or 0 for op in step.ops) == pytest.approx(2 * 4096**3 * (3 * 1 + 2 * 2) / 5)
