"""MFU of a step, of a running loop and of a finished run, and the `tomat mfu` verb."""

import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import reported

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.hardware.chips import chip_for_device_kind, slice_named
from tomat.hardware.flops import OperandTypes
from tomat.hardware.mfu import MFU_KEYS, WALL_PARTS, RunTimes, run_report, step_report
from tomat.train.mfu import live_mfu, step_work
from tomat.train.runs.history import append_event
from tomat.train.settings.config import config_from_dict, load_config

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
RUN = str(Path(__file__).parents[1] / "fixtures" / "run")

REFERENCE = [("200m-v6e16", "v6e-16", 2.08, 0.087), ("1b-v6e32", "v6e-32", 5.76, 0.130)]
"""Configuration, slice, seconds a step and MFU of the two reference runs, as they were reported ("8.7 %", "13 %")."""


def small_config(**loss):
    data = {"source": "embedded", "layout": "v3-p7", "n_density_tokens": 1024}
    return config_from_dict({"preset": "demo", "data": data, "loss": loss, "trainer": {"train_batch_size": 8}})


@pytest.mark.parametrize("name, slice_name, seconds, reported", REFERENCE)
def test_the_reference_runs(name, slice_name, seconds, reported):
    work = step_work(load_config(CONFIGS / f"{name}.yaml"), "tpu")
    mfu = step_report(work, slice_named(slice_name), seconds)
    # They gave two digits; Levanter's count gives 8.73 % and 12.94 %, the plain full one 8.68 % and 12.92 %.
    assert mfu["mfu_levanter"] == pytest.approx(reported, abs=0.001)
    assert mfu["mfu_full"] == pytest.approx(reported, abs=0.001)
    assert mfu["mfu_useful"] < mfu["mfu_causal"] < mfu["mfu_full"] < mfu["mfu_levanter"]
    # Layers are computed again, and tiles cover more than the mask leaves.
    assert mfu["hfu"] > mfu["mfu_causal"] * 1.2


@pytest.mark.parametrize(
    "name, seconds, tflops_per_second",
    [("llama3.1-8b-v6e16", 3.393, 419.485), ("mistral-7b-v6e8", 6.320, 431.981)],
)
def test_the_compared_recipes_are_the_published_models(name, seconds, tflops_per_second):
    """MaxText counts its FLOPs with full attention; the configurations say where the figures stand."""
    config = load_config(CONFIGS.parent / "compare" / f"{name}.yaml")
    work = step_work(config, "tpu")
    chips = slice_named(str(config.slice)).n_chips
    assert work.full.total / chips / seconds == pytest.approx(1e12 * tflops_per_second, rel=2e-4)


def test_useful_tokens_of_the_default_layout():
    work = step_work(load_config(CONFIGS / "200m-v6e16.yaml"), "tpu", n_atoms=12)
    # 21 fixed tokens and 10 for each of 12 atoms; 19^3 voxels.
    assert (work.useful.n_preamble, work.useful.n_density) == (141, 6859)
    assert work.tokens == 128 * 8192
    filled = step_work(load_config(CONFIGS / "200m-v6e16.yaml", ["--data.layout", "v3-fill8k"]), "tpu", 29)
    # SHAPE and 10 for each of 29 atoms; a box of 19 x 20 x 20.
    assert (filled.useful.n_preamble, filled.useful.n_density) == (21 + 5 + 290, 7600)
    assert (filled.full.total, filled.executed.total) == (work.full.total, work.executed.total)
    assert filled.useful_products.total > 1.1 * work.useful_products.total
    many = step_work(load_config(CONFIGS / "200m-v6e16.yaml"), "tpu", n_atoms=300)
    assert many.useful.n_density < 6859  # the patch shrinks


def test_the_prior_makes_the_heads_products_wider():
    """That are executed: what a model is credited with is the same."""
    words = (["--model.environment.prior_anchors", anchors] for anchors in ("0", "64"))
    plain, prior = (step_work(load_config(CONFIGS / "200m-v6e16.yaml", each), "tpu") for each in words)
    assert prior.executed.head == plain.executed.head * (1024 + 64) // 1024
    assert prior.full == plain.full


def test_loss_over_density_ids_needs_no_logits_of_others():
    density = step_work(small_config(kind="cross_entropy", vocabulary="density"), "cpu")
    full = step_work(small_config(kind="cross_entropy", vocabulary="full"), "cpu")
    assert (density.useful.head_rows, full.useful.head_rows) == (1024, 1024 + 2186)
    assert density.full.total == full.full.total
    assert density.useful_products.total < full.useful_products.total
    assert density.executed.total < full.executed.total


def test_live_mfu_of_a_chip_with_two_devices_and_of_one_without_a_known_peak():
    row = live_mfu(small_config(), "TPU7x", 8).row(1.0)
    assert row["tokens_per_second_per_chip"] == 8 * 512 / 4
    chip = chip_for_device_kind("TPU7x")
    least = step_work(small_config(), "tpu").full.total / (4 * chip.peak_bf16_flops_per_second)
    assert row["mfu_full"] == pytest.approx(least)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a CPU is nothing to warn about
        row = live_mfu(small_config(), "cpu", 1).row(0.5)
    assert row == {"tokens_per_second": 2 * 8 * 512, "tokens_per_second_per_chip": 2 * 8 * 512}


INT8 = "8b-v6e256-int8"


def test_int8_products_are_held_to_the_int8_peak(capsys):
    """By hand: 2 of 3 products of a projection, and the one computed again, at twice the rate of the rest."""
    config = load_config(CONFIGS / f"{INT8}.yaml")
    work, slice_ = step_work(config, "tpu"), slice_named("v6e-256")
    floats = step_work(load_config(CONFIGS / "8b-v6e256.yaml"), "tpu")
    assert (work.full, work.executed) == (floats.full, floats.executed)
    weights = 32 * (4096 * 128 * (32 + 2 * 8) + 4096 * 4096 + 3 * 4096 * 14336)
    one_pass = 2 * 1024 * 8192 * weights
    assert work.full.by_operand(work.operands) == {
        "int8": 2 * one_pass,
        "bf16": pytest.approx(floats.full.total - 2 * one_pass),
    }
    report = step_report(work, slice_, 2.0)
    least = (floats.full.total - one_pass) / slice_.peak_bf16_flops_per_second
    assert report["mfu_full"] == pytest.approx(least / 2.0)
    assert report["hfu"] < 0.75 < 1.08 < step_report(floats, slice_, 2.0)["hfu"]
    # What Levanter logs knows of no int8.
    assert report["mfu_levanter"] == step_report(floats, slice_, 2.0)["mfu_levanter"]
    row = live_mfu(config, "TPU v6 lite", 256).row(2.0)
    assert {key: row[key] for key in MFU_KEYS} == {key: pytest.approx(report[key]) for key in MFU_KEYS}
    # Where no source states an int8 peak nothing is faster than bf16.
    other = slice_named("tpu7x-512")
    assert step_report(work, other, 2.0)["hfu"] == pytest.approx(step_report(floats, other, 2.0)["hfu"])
    arguments = ["mfu", "--config_path", str(CONFIGS / f"{INT8}.yaml"), "--step_seconds"]
    assert main([*arguments, "1.3"]) == 0
    assert "HFU is over 100 %" in capsys.readouterr().out
    assert main([*arguments, "0.9"]) == 2


@pytest.mark.parametrize(
    "words, device_kind, factor",
    [
        ([], "NVIDIA H100 80GB HBM3", 1.0),
        (["--trainer.mp", "f32"], "NVIDIA H100 80GB HBM3", 989.4 / 494.7),
        (["--trainer.mp", "f32"], "NVIDIA A100-SXM4-40GB", 2.0),
        (["--trainer.mp", "f32"], "TPU v6 lite", 1.0),  # rounds to bf16
    ],
)
def test_float32_products_are_held_to_their_own_peak(words, device_kind, factor):
    found, plain = (live_mfu(load_config(CONFIGS / "200m-v6e16.yaml", each), device_kind, 8) for each in (words, []))
    assert found.row(1.0)["hfu"] == pytest.approx(factor * plain.row(1.0)["hfu"])


def test_types_of_products_are_counted_and_a_precision_without_a_known_peak_is_refused():
    for words, types in (
        (["--trainer.quantization", "{int8: true}"], OperandTypes("int8", "int8", "bf16")),
        (["--trainer.quantization", "{fp8: true}"], OperandTypes("fp8", "fp8", "fp8")),
        (["--model.upcast_attn", "true"], OperandTypes(attention="f32")),
    ):
        assert step_work(load_config(CONFIGS / "200m-v6e16.yaml", words), "gpu").operands == types
    words = ["--trainer.mp", "f32", "--trainer.jax_config", "{jax_default_matmul_precision: highest}"]
    with pytest.warns(UserWarning, match="no MFU is reported: .*highest"):
        assert "hfu" not in live_mfu(load_config(CONFIGS / "200m-v6e16.yaml", words), "NVIDIA H200", 1).row(1.0)


def a_row(step, seconds, hook=0.0, loading=0.0, rest=0.0, **parts):
    hooks = hook + sum(parts.get(f"{part}_seconds", 0.0) for part in ("eval", "profiler"))
    wall = seconds + loading + hooks + parts.get("checkpoint_seconds", 0.0) + rest
    row = {"step": step, "step_seconds": seconds, "wall_seconds": wall, **parts}
    return {**row, "throughput/loading_time": loading, "throughput/hook_time": hooks}


def test_wall_clock_is_attributed():
    rows = [
        a_row(0, 31.0, compile_seconds=30.0, loading=2.0),
        *(a_row(i, 1.0, loading=0.1, hook=0.05, rest=0.01) for i in range(1, 9)),
        a_row(9, 1.0, eval_seconds=9.0, compile_seconds=4.0, checkpoint_seconds=3.0, profiler_seconds=0.5),
    ]
    times = RunTimes.from_rows(rows, "log")
    assert times.step_seconds == pytest.approx(10.0)
    expected = {"compile": 34.0, "data_loading": 2.8, "evaluation": 5.0, "checkpoint": 3.0, "profiler": 0.5,
                "hooks": 0.4, "other": 0.08}  # fmt: skip
    assert dict(times.part_seconds) == pytest.approx(expected)
    assert times.wall_seconds == pytest.approx(10.0 + sum(expected.values()))
    assert len(times.steady_step_seconds) == 8
    assert times.step_percentiles == {"p10": 1.0, "p50": 1.0, "p90": 1.0}
    rows = [a_row(0, 60.0, compile_seconds=50.0), *(a_row(i, float(i), rest=0.5) for i in range(1, 12))]
    assert RunTimes.from_rows(rows, "log").step_percentiles == pytest.approx({"p10": 2.0, "p50": 6.0, "p90": 10.0})
    alone = RunTimes.from_rows([a_row(0, 31.0, compile_seconds=30.0)], "log")
    assert alone.step_percentiles["p50"] == alone.step_seconds == pytest.approx(1.0)


SMALL_WORK = step_work(small_config(), "tpu")
WALL_SECONDS = st.floats(1e-9, 100)
"""No clock counts less than a nanosecond."""
ROWS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9), "step_seconds": st.floats(0.01, 100), "wall_seconds": WALL_SECONDS},
        optional=dict.fromkeys(
            [f"{part}_seconds" for part in ("compile", "eval", "checkpoint", "profiler")]
            + ["throughput/loading_time", "throughput/hook_time"],
            st.floats(0, 100, allow_nan=False),
        ),
    ),
    min_size=1,
    max_size=8,
)


@given(rows=ROWS)
@settings(max_examples=60, deadline=None)
def test_parts_sum_to_the_wall_clock_and_to_the_lost_mfu(rows):
    times = RunTimes.from_rows(rows, "log")
    assert set(times.part_seconds) == set(WALL_PARTS)
    assert times.step_seconds + sum(times.part_seconds.values()) == pytest.approx(times.wall_seconds, abs=1e-9)
    assert all(times.part_seconds[part] >= 0 for part in WALL_PARTS if part != "other")
    result = run_report(SMALL_WORK, times, slice_named("v6e-4"))
    difference = result["step_mfu_full"] - result["wall_mfu_full"]
    assert sum(result["wall_mfu_full_lost"].values()) == pytest.approx(difference, rel=1e-6, abs=1e-12)
    rounding = 1 + 1e-9
    assert result["mfu_full_p10"] <= result["mfu_full"] * rounding <= result["mfu_full_p90"] * rounding**2


def test_verb_with_a_configuration(tmp_path, capsys):
    arguments = ["mfu", "--config_path", CONFIGS / "200m-v6e16.yaml", "--slice", "v6e-16", "--step_seconds", 2.08]
    result = reported(tmp_path, *arguments)
    assert result["mfu_levanter"] == pytest.approx(0.0873, abs=5e-5)
    assert result["tokens_per_second_per_chip"] == pytest.approx(128 * 8192 / 2.08 / 16)
    printed = capsys.readouterr().out
    assert "8.73 %" in printed and "220.4 M parameters" in printed
    # Batch and length by their short names; half the batch in the same time is half the MFU.
    half = reported(tmp_path, *arguments, "--batch", 64, "--seq_len", 4096)
    assert half["sequence_tokens"] == 4096 and half["tokens_per_second"] == result["tokens_per_second"] / 4


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(small_config().to_dict()))
    rows = [a_row(0, 5.0, compile_seconds=4.0), *(a_row(i, 1.0, loading=0.25) for i in range(1, 5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "st')
    return tmp_path


def test_a_run_has_the_mfu_of_what_it_ran_on(run_dir, tmp_path, capsys):
    """A recipe for 16 chips that ran on 8 had half its MFU; one that ran on a CPU has none."""
    figures = partial(reported, tmp_path, "mfu", "--run", run_dir)
    found = figures()
    assert found["mfu_full"] is None and "slice is not known" in capsys.readouterr().out
    assert found["tokens_per_second"] == 8 * 512 and found["wall_seconds_by_part"]["compile"] == 4.0
    found = figures("--slice", "h200")
    assert found["wall_mfu_full"] == pytest.approx(found["mfu_full"] / 2)  # 5 s of steps in 10 s of wall-clock time
    assert "data loading" in capsys.readouterr().out

    (run_dir / "config.yaml").write_text(yaml.safe_dump({**small_config().to_dict(), "slice": "v6e-16"}))
    found = figures()
    assert found["mfu_full"] is None and found["asked_slice"] == "v6e-16" and found["devices_that_ran"] is None
    assert "v6e-16 was asked for, and which devices ran is not on record" in capsys.readouterr().out
    wished = figures("--slice", "v6e-16")
    assert "not on record: v6e-16 is assumed, as --slice says" in capsys.readouterr().out

    append_event(run_dir, "start", 0, devices="8 x TPU v6 lite", hosts=1)
    found = figures()
    assert (found["slice"], found["n_chips"]) == ("v6e-8", 8)
    assert found["mfu_full"] == pytest.approx(2 * wished["mfu_full"])
    assert "note: slice v6e-16 was asked for, and 8 x TPU v6 lite on 1 host ran" in capsys.readouterr().out
    assert figures("--slice", "v6e-8")["mfu_full"] == found["mfu_full"]
    assert main(["mfu", "--run", str(run_dir), "--slice", "v6e-16"]) == 2
    assert "ran on 8 x TPU v6 lite on 1 host; leave --slice out" in capsys.readouterr().err

    append_event(run_dir, "resume", 3, devices="2 x cpu", hosts=1)
    found = figures()
    assert found["mfu_full"] is None and found["n_steps"] == 2
    told = capsys.readouterr().out
    assert "peak of 2 x cpu on 1 host is not known" in told and "the 3 steps before step 3" in told


def test_a_run_faster_than_its_slice_is_refused(run_dir, tmp_path, capsys):
    """Its useful work alone would take one chip longer: another slice ran it. And one whose log is damaged."""
    rows = [a_row(0, 5.0, compile_seconds=4.0), *(a_row(i, 1e-6) for i in range(1, 5))]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "mfu.json"
    assert main(["mfu", "--run", str(run_dir), "--slice", "v6e-1", "--json", str(out)]) == 2
    told = capsys.readouterr().err
    assert "takes v6e-1 at least" in told and "metrics.jsonl" in told and told.count("\n") == 1
    assert not out.exists()
    assert main(["mfu", "--run", str(run_dir), "--json", str(out)]) == 0
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "step_seconds": -1}')
    assert main(["mfu", "--run", str(run_dir)]) == 2
    assert f"error: {run_dir}/metrics.jsonl: step 0 has step_seconds -1; expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "give --config_path"),
        ("--config_path demo --run RUN", "give --config_path"),
        ("--config_path nowhere.yaml --step_seconds 1", "nowhere.yaml does not exist"),
        ("--config_path 200m-v6e16 --step_seconds 0", "expected a finite number above 0"),
        ("--config_path demo --step_seconds 1", "names no slice"),
        ("--config_path demo --step_seconds 1 --atoms 0", "--atoms: found '0'"),
        ("--config_path 200m-v6e16 --step_seconds 0.001", "takes v6e-16 at least"),
        ("--config_path 200m-v6e16 --step_seconds 2 --atoms 1000000", "atom"),
        ("--run nowhere", "nowhere is not a run"),
        ("--run RUN --step_seconds 1", "does not go with --run"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    out = tmp_path / "mfu.json"
    assert main(["mfu", *arguments.replace("RUN", RUN).split(), "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 1e6, "0.5", True])
def test_a_log_with_a_time_that_is_none_is_refused(seconds):
    row = {"step": 0, "step_seconds": 0.5}
    with pytest.raises(TomatError, match="^a/log: step 1 has step_seconds .*; expected 0 to .* Delete the line"):
        RunTimes.from_rows([row, {"step": 1, "step_seconds": seconds}], Path("a/log"))
    assert RunTimes.from_rows([{**row, "eval_seconds": None}], "log").wall_seconds == 0.5
    with pytest.raises(TomatError, match="log: none of its 1 rows"):
        RunTimes.from_rows([{"step": 0, "train/loss": 1.0}], "log")
