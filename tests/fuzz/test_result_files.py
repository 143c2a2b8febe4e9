"""Every reader of files that runs, profiles and plans leave gives a valid result or one TomatError for damaged ones.

Traces, programs, logs and reports have no checksum: a number that damage made another possible number cannot be seen,
so the property is only that what comes out is whole. Each reader has a valid file that is damaged in the ways of
`fuzz_damage.py`; none may raise anything else, hang, or take far more memory than its file.
"""

import contextlib
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chrome_trace import chrome_events
from fuzz_damage import ODD_INTEGERS, damaged_file, damaged_texts, fuzz_file, fuzz_json, fuzz_lines
from hypothesis import strategies as st
from trace_builder import build_xspace, serialise_program

from tomat.app.eval_verbs import read_report
from tomat.base.errors import TomatError
from tomat.base.overrides import parse_overrides, read_yaml
from tomat.base.report.markdown import markdown
from tomat.hardware.mfu import RunTimes
from tomat.perf.plan.calibration import Calibration, read_measurements
from tomat.perf.profile.breakdown import Breakdown, Roofs
from tomat.perf.profile.hlo import HloProgram, Instruction
from tomat.perf.profile.hlo_files import program_from_text
from tomat.perf.profile.load import load_breakdown
from tomat.perf.profile.program_breakdown import compiler_seconds
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.two_breakdowns import compare_breakdowns
from tomat.perf.tuning.sweep_config import load_sweep
from tomat.predict.evaluation.result import LABEL, MaterialResult, PartialResults, TeacherForcedResult
from tomat.report.pages.report import breakdown_parts, memory_part, operations_parts, read_record, write_index
from tomat.train.runs.history import read_events, read_metrics
from tomat.train.runs.record import read_record as read_run
from tomat.train.runs.summary import summarise
from tomat.train.runs.verify import verify_run

V6E = "TPU v6 lite"

HLO_TEXT = """HloModule tiny

%fused (p0: f32[8,8], p1: f32[8,8]) -> f32[8,8] {
  %p0 = f32[8,8] parameter(0)
  %p1 = f32[8,8] parameter(1)
  ROOT %add.1 = f32[8,8] add(%p0, %p1)
}

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %dot.1 = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,8]) tuple(%next, %dot.1)
}

%condition (c: (s32[], f32[8,8])) -> pred[] {
  %c = (s32[], f32[8,8]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[8,8], k: f32[4,8,8]) -> f32[8,8] {
  %a = f32[8,8] parameter(0)
  %k = f32[4,8,8] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]) tuple(%zero, %a)
  %while.1 = (s32[], f32[8,8]) while(%start), condition=%condition, body=%body
  %y = f32[8,8] get-tuple-element(%while.1), index=1
  %slice.1 = f32[1,8,8] slice(%k), slice={[0:1], [0:8], [0:8]}
  %convolution.1 = f32[1,8,8] convolution(%slice.1, %k), window={size=4 pad=0_3}, dim_labels=b0f_0io->b0f
  %copy.1 = f32[8,8] copy(%y)
  ROOT %fusion.1 = f32[8,8] fusion(%copy.1, %a), kind=kLoop, calls=%fused
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def program() -> HloProgram:
    return program_from_text(HLO_TEXT, "tiny")


@pytest.fixture(scope="module")
def xspace(program: HloProgram) -> bytes:
    """A trace of four steps of the program on one TPU, with its HLO, and a host that was waiting."""
    roofs = Roofs.of_device_kind(V6E)

    def seconds(instruction: Instruction) -> float:
        return max(1e-6, compiler_seconds(program, instruction, roofs) or 0.0)

    space = new_message("XSpace")
    space.ParseFromString(build_xspace(program, V6E, seconds, 4, serialise_program(program)))
    host = space.planes.add(name="/host:CPU", id=7)
    host.event_metadata[1].id, host.event_metadata[1].name = 1, "wait"
    host.lines.add(id=1, name="python").events.add(metadata_id=1, offset_ps=0, duration_ps=10**9)
    return space.SerializeToString()


def whole_breakdown(breakdown: Breakdown) -> None:
    """A breakdown whose figures are finite and add up, and which can be shown and compared."""
    assert math.isfinite(breakdown.step_seconds) and breakdown.step_seconds >= 0
    shares = sum(row.share for row in breakdown.categories)
    assert breakdown.step_seconds == 0 or breakdown.source != "trace" or abs(shares - 1) < 1e-6
    json.dumps(breakdown.to_dict(), allow_nan=False)
    for parts in ([memory_part(breakdown)], breakdown_parts(breakdown, "x"), operations_parts(breakdown)):
        assert markdown(parts)
    compare_breakdowns(breakdown, breakdown)


def read_breakdown(path: Path) -> None:
    whole_breakdown(load_breakdown(str(path), device_kind=V6E))


EVENT_DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(("event", "event", "event", "line", "stat", "metadata")),
        st.sampled_from(
            ("offset_ps", "duration_ps", "metadata_id", "timestamp_ns", "uint64_value", "str_value", "name")
        ),
        st.integers(0, 10**6),
        st.sampled_from(ODD_INTEGERS),
    ),
    min_size=1,
    max_size=12,
)


def damaged_xspace(data: bytes, steps: list[tuple[str, str, int, int]]) -> bytes:
    """A trace in which fields of events, lines and statistics hold something else."""
    space = new_message("XSpace")
    space.ParseFromString(data)
    lines = [line for plane in space.planes for line in plane.lines]
    events = [event for line in lines for event in line.events]
    metadata = [entry for plane in space.planes for _, entry in sorted(plane.event_metadata.items())]
    stats = [stat for holder in (*space.planes, *events, *metadata) for stat in holder.stats]
    places = {"event": events, "line": lines, "stat": stats, "metadata": metadata}
    for kind, field, place, value in steps:
        target = places[kind][place % len(places[kind])]
        with contextlib.suppress(AttributeError, ValueError, TypeError):  # the message has no such field
            setattr(target, field, str(value) if field in ("str_value", "name") else value)
    return space.SerializeToString()


def test_xplane(folder: Path, xspace: bytes):
    inputs = st.one_of(
        damaged_file(xspace),
        EVENT_DAMAGE.map(lambda steps: damaged_xspace(xspace, steps)),
    )
    fuzz_file(folder / "a.xplane.pb", xspace, inputs, read_breakdown, 350)


def test_chrome_trace(folder: Path):
    fuzz_json(folder / "a.trace.json", {"traceEvents": chrome_events(4)}, read_breakdown, 400)


CONFIGS = (b"{", b"[]", b'{"window_config": {"estimated_cycles": "nan"}}', b'{"window_config": 3}', b"[" * 20000,
           b'{"known_trip_count": {"n": "-7"}}', b'{"known_trip_count": {"n": "99999999999999999999"}}')  # fmt: skip
OPCODES = ("add", "dot", "while", "fusion", "parameter", "slice", "convolution", "scatter", "all-reduce", "custom-call")
INSTRUCTIONS: dict[str, Callable[[Any, int], Any]] = {
    "id": lambda at, value: setattr(at, "id", value),
    "operand": lambda at, value: at.operand_ids.__setitem__(0, value),
    "size": lambda at, value: at.shape.dimensions.append(value),
    "tuple_index": lambda at, value: setattr(at, "tuple_index", value),
    "parameter_number": lambda at, value: setattr(at, "parameter_number", value),
    "opcode": lambda at, value: setattr(at, "opcode", OPCODES[value % len(OPCODES)]),
    "config": lambda at, value: setattr(at, "backend_config", CONFIGS[value % len(CONFIGS)]),
    "frame": lambda at, value: setattr(at.metadata, "stack_frame_id", value),
    "contracted": lambda at, value: at.dot_dimension_numbers.lhs_contracting_dimensions.append(value),
    "window": lambda at, value: at.window.dimensions.add(size=value, base_dilation=value, stride=3),
    "drop": lambda at, value: at.operand_ids.__delitem__(slice(None)),
    "literal": lambda at, value: at.literal.s32s.append(value),
}
INSTRUCTION_DAMAGE = st.lists(
    st.tuples(st.sampled_from([*INSTRUCTIONS, "called", "root"]), st.integers(0, 10**6), st.sampled_from(ODD_INTEGERS)),
    min_size=1,
    max_size=3,
)


def damaged_module(data: bytes, steps: list[tuple[str, int, int]]) -> bytes:
    """An HLO module whose instructions name, call or hold something else."""
    message = new_message("HloProto")
    message.ParseFromString(data)
    computations = message.hlo_module.computations
    found = [instruction for computation in computations for instruction in computation.instructions]
    for kind, place, value in steps:
        with contextlib.suppress(ValueError, IndexError):  # the value does not fit the field, or there is none
            at = found[place % len(found)]
            if kind == "root":
                computations[place % len(computations)].root_id = value
            elif kind == "called":
                at.called_computation_ids.append(computations[value % len(computations)].id)
            else:
                INSTRUCTIONS[kind](at, value)
    return message.SerializeToString()


@pytest.mark.parametrize(("suffix", "count"), [("", 500), (".gz", 100)])
def test_hlo_module(folder: Path, program: HloProgram, suffix: str, count: int):
    module = serialise_program(program)
    whole = gzip.compress(module, mtime=0) if suffix else module
    inputs = damaged_file(whole)
    if not suffix:
        inputs = st.one_of(inputs, INSTRUCTION_DAMAGE.map(lambda steps: damaged_module(whole, steps)))
    fuzz_file(folder / f"a.hlo.pb{suffix}", whole, inputs, read_breakdown, count)


@pytest.mark.filterwarnings("ignore:no peak is known")
def test_breakdown(folder: Path, xspace: bytes):
    (folder / "b.xplane.pb").write_bytes(xspace)
    whole = load_breakdown(str(folder / "b.xplane.pb")).to_dict()
    fuzz_json(folder / "b.json", whole, read_breakdown, 400)


ROWS = [
    {"step": step, "train/loss": 4.0 - step / 10, "mfu_full": 0.01, "step_seconds": 0.5, "wall_seconds": 0.6,
     "compile_seconds": 2.0 if step == 0 else 0.0, "eval_seconds": 0.1, "throughput/loading_time": 0.01,
     "eval/validation/loss": 3.5}
    for step in range(6)
]  # fmt: skip
EVENTS = [
    {"time": "2026-01-01T00:00:00", "event": "start", "step": 0, "configuration": "abc"},
    {"time": "2026-01-01T00:01:00", "event": "preempted", "step": 3, "cause": "SIGTERM"},
    {"time": "2026-01-01T00:02:00", "event": "resume", "step": 3, "after": "preempted", "steps_again": 0},
    {"time": "2026-01-01T00:03:00", "event": "guard:bad_loss", "step": 5, "action": "stop", "reason": "not finite"},
]
CONFIG = {
    "run_name": "a", "purpose": "for a test", "preset": "tiny",
    "trainer": {"num_train_steps": 20, "checkpointer": {"temporary_base_path": None}}, "data": {"seq_len": 64},
}  # fmt: skip


def test_metrics(folder: Path):
    def read(path: Path) -> None:
        rows = read_metrics(path)
        assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
        times = RunTimes.from_rows(rows, "log")
        figures = (times.wall_seconds, times.step_seconds, *times.part_seconds.values())
        assert all(math.isfinite(figure) for figure in figures)
        assert all(value > 0 for value in times.step_percentiles.values())

    fuzz_lines(folder / "m.jsonl", ROWS, read, 400)


@pytest.mark.parametrize("name", ["metrics.jsonl", "history.jsonl", "config.yaml"])
def test_run_folder(folder: Path, name: str):
    """What `tomat runs` reads of a run, one of its files damaged; nothing but its configuration can refuse it."""
    run = folder / f"run-{name}"
    run.mkdir()
    rows = {"metrics.jsonl": ROWS, "history.jsonl": EVENTS}
    texts = {file: "".join(json.dumps(row) + "\n" for row in some) for file, some in rows.items()}
    texts["config.yaml"] = yaml.safe_dump(CONFIG)
    for file, text in texts.items():
        (run / file).write_text(text, encoding="utf-8")

    def read(_: Path) -> None:
        record = read_run(str(run))
        summary = summarise(record, None, 0, 0.0)
        json.dumps(summary.to_dict(), allow_nan=False)
        verdict = verify_run(record, [])
        assert all(len(text) < 1000 for text in verdict.problems)
        assert read_events(run) == record.events
        if name != "config.yaml" and verdict.problems:
            raise TomatError("damage was found")

    if name in rows:
        fuzz_lines(run / name, rows[name], read, 300)
    else:
        inputs = damaged_texts(CONFIG, yaml.safe_dump)
        fuzz_file(run / name, texts[name].encode(), inputs, read, 300)


def report_document() -> dict[str, Any]:
    """A report of `tomat eval --json` of two materials."""
    figures = {
        "patches": 2, "voxels": 128, "teacher_forced_nmae_median": 0.1, "teacher_forced_nmae_mean": 0.12,
        "teacher_forced_nmae_mode": 0.11, "teacher_forced_nemd": 0.2, "teacher_forced_cross_entropy_nats": 1.5,
        "teacher_forced_charge_relative_error": -0.01, "teacher_forced_charge_e": 9.9, "reference_charge_e": 10.0,
        "codec_floor_nmae": 0.001, "lorenzo_nmae": 0.3, "copy_previous_nmae": 0.4, "constant_median_nmae": 0.9,
    }  # fmt: skip
    materials = tuple(MaterialResult(material_id=name, **figures) for name in ("mp-1", "mp-2"))
    report = TeacherForcedResult({"run": "a", "step": 3, "layout": "v3", "seed": 0}, materials).to_dict()
    assert report["label"] == LABEL
    return report


def test_evaluation_report(folder: Path):
    report = report_document()
    needed = {key: report[key] for key in ("label", "settings", "materials")}  # the rest is for other readers
    whole = TeacherForcedResult.from_dict(report, "here")

    def read(path: Path) -> None:
        result = read_report(path)
        json.dumps(result.to_dict(), allow_nan=False)
        assert result.summary() and result.table().rows
        with contextlib.suppress(TomatError):  # of other materials, or other settings
            whole.compare(result)

    fuzz_json(folder / "e.json", needed, read, 80)


def test_partial_evaluation(folder: Path):
    rows = [{"settings": {"run": "a"}}, *report_document()["materials"]]
    fuzz_lines(folder / "p.jsonl", rows, lambda path: PartialResults(path, {"run": "a"}), 100)


PAGE = """# Runs
By hand.
<!-- tomat:begin runs -->
old
<!-- tomat:end runs -->
<!-- tomat:begin sweeps -->
<!-- tomat:end sweeps -->
## Verdict
"""
RECORD = {
    "record_format": 1, "run": "r1", "kind": "measured", "commit": "abc", "date": "2026-01-01", "config_hash": "12",
    "slice": "v6e-16", "model": "200m", "batch_sequences": 64, "sequence_tokens": 8192, "step_seconds": 0.5,
    "mfu_full": 0.4, "mfu_causal": 0.3, "mfu_useful": 0.2, "mfu_levanter": 0.4, "hfu": 0.5,
    "tokens_per_second_per_chip": 1000.0, "largest_category": "matmul", "largest_category_share": 0.4,
    "config": {"a.b": 1},
}  # fmt: skip


@pytest.mark.parametrize(("name", "document"), [("index.md", None), ("data/r1.json", RECORD)])
def test_tracking_folder(folder: Path, name: str, document: dict[str, Any] | None):
    """The index is written anew, or refused and left as it was with what people wrote in it."""
    docs = folder / name.replace("/", "-")
    for file, text in (("index.md", PAGE), ("data/r1.json", json.dumps(RECORD))):
        (docs / file).parent.mkdir(parents=True, exist_ok=True)
        (docs / file).write_text(text, encoding="utf-8")

    def read(_: Path) -> None:
        before = (docs / "index.md").read_bytes()
        try:
            write_index(docs)
            read_record(docs, "r1")
        except TomatError:
            assert (docs / "index.md").read_bytes() == before or name != "index.md"
            raise
        assert b"<!-- tomat:begin runs -->" in (docs / "index.md").read_bytes()

    if document is None:
        inputs = damaged_file(PAGE.encode())
        fuzz_file(docs / name, PAGE.encode(), inputs, read, 250)
    else:
        fuzz_json(docs / name, document, read, 250)


def test_overrides_and_configuration_files(folder: Path):
    text = "a:\n  b: 1.5\n  c: [1, two, {d: 2026-01-01}]\nrun_name: x\n"

    def read(path: Path) -> None:
        assert isinstance(read_yaml(path, "configs/"), dict)
        assert isinstance(parse_overrides(["--a.b", path.read_text(errors="replace"), "--c=1"]), dict)

    fuzz_file(folder / "c.yaml", text.encode(), damaged_file(text.encode()), read, 200)


CALIBRATION = {
    "rows": [
        {"name": "a", "slice": "v6e-16", "source": "x", "measured": {"fits": True, "step_seconds": 2.0},
         "config_path": "c.yaml", "overrides": ["--a", "1"], "config": None,
         "predicted": {"fits": True, "model_seconds": 1.5}, "compiler": "0.0.46"}
    ]
}  # fmt: skip


def test_calibration(folder: Path):
    def read(_: Path) -> None:
        record = Calibration.load(folder)
        assert all(0 < ratio < math.inf for ratio in record.step_ratios("v6e"))
        assert record.notes("v6e")

    fuzz_json(folder / "calibration.json", CALIBRATION, read, 250)


def test_measurements(folder: Path):
    row = {key: CALIBRATION["rows"][0][key] for key in ("name", "source", "measured", "config_path")}
    document = {"measurements": [row]}
    inputs = damaged_texts(document, yaml.safe_dump)
    whole = yaml.safe_dump(document).encode()
    fuzz_file(folder / "calibration.yaml", whole, inputs, lambda path: read_measurements(path.parent), 100)


def test_sweep(folder: Path):
    document = {
        "name": "s", "config_path": "c.yaml", "base": "first", "overrides": {"a.b": 1},
        "rows": [{"name": "first", "overrides": {"c": 2}}, {"name": "second", "slice": "v6e-8"}],
        "grid": {"x.y": [1, 2], "z": [{"name": "big", "overrides": {"w": 3}}]}, "exclude": [{"x.y": 2}],
    }  # fmt: skip
    inputs = damaged_texts(document, yaml.safe_dump)

    def read(path: Path) -> None:
        assert load_sweep(path).rows

    fuzz_file(folder / "s.yaml", yaml.safe_dump(document).encode(), inputs, read, 250)
