"""A small model planned for a v6e-4 by the real TPU compiler, where it is installed (`uv sync --extra plan`)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import instead_of_compiling
from json_keys import assert_keys_of_before
from reported import reported
from shared_folder import alone, shared_folder

import tomat
from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.perf.cost.chip_model import CHECKOUT_FILE, RECORD_FILE
from tomat.perf.plan.compile.compiler import compile_step
from tomat.perf.plan.compile.topology import planned_slice
from tomat.train.settings.config import load_config

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")

SMALL = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "256",
    "--model.num_layers", "2", "--model.hidden_dim", "128", "--model.intermediate_dim", "256", "--model.num_heads", "1",
    "--model.num_kv_heads", "1", "--model.head_dim", "128", "--trainer.train_batch_size", "8",
    "--model.attn_backend", "splash", "--model.qk_rotary.kernel", "pallas", "--run_name", "small",
    "--model.splash", "{block_q: 128, block_kv: 128, block_q_dkv: 128, block_kv_dkv: 128, use_fused_bwd: true}",
    "--trainer.per_device_parallelism", "1",
]  # fmt: skip
"""Of two microbatches: accumulation puts the scan of the layers into a loop; the mask of attention is behind both."""
CAUSAL_SHARE = 10 / 16
"""Of 4 x 4 blocks of 128 positions, those on or below the diagonal."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return shared_folder(tmp_path_factory, "plan-cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a configuration file for the verb."""
    made = tmp_path_factory.mktemp("plans")
    (made / "small.yaml").write_text(yaml.safe_dump(load_config(None, SMALL).to_dict()))
    return made


@pytest.fixture(scope="module")
def words(cache, folder) -> list[str]:
    """Of the verb."""
    return ["plan", "--config_path", str(folder / "small.yaml"), "--slice", "v6e-4", "--cache_dir", str(cache)]


@pytest.fixture(scope="module")
def report(cache, folder, words) -> dict:
    """The plan's JSON, by the verb, whose compiler is started as everywhere."""
    with alone(cache):
        return reported(folder, *words, "--executable", folder / "step.bin")


@pytest.fixture(autouse=True)
def forked(request, monkeypatch) -> None:
    """The other compiles are forked, without the 6 s of processor time of their imports."""
    if "report" in request.fixturenames:
        request.getfixturevalue("report")
    instead_of_compiling(monkeypatch)


@pytest.mark.slow
def test_a_plan_has_memory_cycles_and_utilisation(report):
    assert_keys_of_before("plan", report)
    assert report["fits"] is True
    assert 0 < report["hbm_required_bytes"] < report["hbm_capacity_bytes"]
    step = report["step_seconds"]
    for key in ("step_seconds", "mfu_full", "mfu_causal", "mfu_useful", "hfu"):
        assert 0 < report[key]["low"] < report[key]["estimate"] < report[key]["high"] < 1
    assert report["mfu_useful"]["estimate"] < report["mfu_causal"]["estimate"] < report["mfu_full"]["estimate"]
    breakdown = report["breakdown"]
    assert sum(op["seconds"] for op in breakdown["ops"]) == pytest.approx(step["estimate"])
    kernels = {kernel["name"].split(".")[0] for kernel in report["pallas_kernels"]}
    assert {"splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals", "norm_rotary_fwd", "norm_rotary_bwd"} <= kernels
    assert any(op["category"] == "matmul" and op["seconds"] > 0 for op in breakdown["ops"])
    # No v6e has timed the backward pass of attention in Pallas, nor a kernel of the norms.
    parts = {part["kind"]: part for part in report["rests_on"]}
    untimed = [part["step_share"] for part in parts.values() if not part["measured_kernels"]]
    assert parts["Pallas: attention backward"]["chips"] == ["tpu7x"]
    assert report["untimed_step_share"] == pytest.approx(sum(untimed)) and 0 < sum(untimed) < 1
    # two layers of two microbatches, in the forward and in the backward scan
    assert {kernel["executions"] for kernel in report["pallas_kernels"]} == {4.0}
    splash = [kernel for kernel in report["pallas_kernels"] if "splash" in kernel["name"]]
    assert {kernel["active_grid_share"] for kernel in splash} == {CAUSAL_SHARE}
    assert report["assumed"] == []


@pytest.mark.slow
def test_the_same_plan_again_compiles_nothing(report, cache, folder):
    config, stages = load_config(folder / "small.yaml"), []
    again = compile_step(config, planned_slice(config, "v6e-4"), cache_dir=cache, on_stage=stages.append)
    assert again.cached and stages == [] and again.key == report["program_key"]
    # another learning rate is another configuration, and another program
    other = load_config(folder / "small.yaml", ["--run_name", "other", "--trainer.seed", "7"])
    assert compile_step(other, planned_slice(other, "v6e-4"), cache_dir=cache).cached


@pytest.mark.slow
def test_the_example_of_the_guide_is_the_plan_of_the_verb(report, cache, folder):
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "python.md").read_text()
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S) if "tomat.plan(" in block]
    places = {'"30m-v6e4-fast"': repr(str(folder / "small.yaml")), '"plans"': repr(str(cache))}
    for name, place in places.items():
        assert name in code
        code = code.replace(name, place)
    found = {"tomat": tomat}
    exec(code, found)
    assert found["plan"].step_seconds.estimate == report["step_seconds"]["estimate"] and found["plan"].compiled.cached


@pytest.mark.slow
def test_a_question_asked_before_is_answered_without_jax_by_few_modules(report, words, tmp_path):
    """The first time without `--executable` keeps the answer, the second finds it."""
    first = reported(tmp_path, *words)
    code = "import sys; from tomat.app.cli import main\n"
    code += f"status = main({[*words, '--json', str(tmp_path / 'third.json')]!r})\n"
    code += "walk = [name for name in sys.modules if name.split('.')[0] == 'tomat']\n"
    code += "sys.exit(status or ('jax' in sys.modules) or (len(walk) > 70 and f'{len(walk)} modules'))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
    assert json.loads((tmp_path / "third.json").read_text()) == {**first, "cached": True}


@pytest.mark.slow
def test_a_chip_that_is_calibrated_anew_is_asked_anew(report, words, tmp_path):
    record = json.loads(CHECKOUT_FILE.read_text())
    words = [*words, "--tracking_dir", str(tmp_path)]
    seconds = []
    for efficiency in (0.9, 0.45):
        record["chips"]["v6e"]["parameters"]["bundle_efficiency"]["value"] = efficiency
        (tmp_path / RECORD_FILE).write_text(json.dumps(record))
        seconds.append(reported(tmp_path, *words)["step_seconds"]["estimate"])
    assert seconds[1] > 1.1 * seconds[0]


@pytest.mark.slow
def test_memory_alone_is_that_of_the_whole_compile(report, cache, folder, tmp_path):
    config = load_config(folder / "small.yaml")
    known, fresh, again = (
        compile_step(config, planned_slice(config, "v6e-4"), cache_dir=place, memory_only=True)
        for place in (cache, tmp_path, tmp_path)
    )
    assert known.cached and known.key == report["program_key"]
    assert fresh.fits and not fresh.cached and again.cached
    assert fresh.memory.required_bytes == report["hbm_required_bytes"]
    assert fresh.memory.largest == known.memory.largest
    # It is no answer to who wants the program.
    assert not (fresh.folder / "program.hlo.pb.gz").exists()
    assert all(path.stem.endswith("-memory") for path in (tmp_path / "requests").iterdir())


TOO_LARGE = [
    "--trainer.train_batch_size", "32768", "--trainer.per_device_parallelism", "-1",
    "--model.gradient_checkpointing", "false",
]  # fmt: skip


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_an_answer_and_its_run_is_not_started(
    cache, folder, words, tmp_path, monkeypatch, capsys
):
    with alone(cache):
        found = reported(tmp_path, *words, "--no_search", *TOO_LARGE, status=1)
    assert found["fits"] is False and found["step_seconds"] is None and found["breakdown"] is None
    assert found["hbm_required_bytes"] > found["hbm_capacity_bytes"] > 31 * 2**30
    assert found["memory"]["largest"][0]["hbm_bytes"] > 2**30
    assert "does not fit" in capsys.readouterr().out
    (tmp_path / ".cache" / "tomat").mkdir(parents=True)
    (tmp_path / ".cache" / "tomat" / "plan").symlink_to(cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = ["--plan_first", "--output_dir", str(tmp_path / "runs"), "--slice", "v6e-4"]
    with alone(cache):
        assert main(["train", "--config_path", str(folder / "small.yaml"), *run, *TOO_LARGE]) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_plan_leaves_a_configuration_that_loads_code_and_what_can_be_compared(
    report, folder, words, tmp_path, capsys
):
    out = tmp_path / "ready.yaml"
    assert main([*words, "--emit", str(out)]) == 0
    assert load_config(out).slice == "v6e-4" and report["program_key"] in out.read_text()
    assert (folder / "step.bin").stat().st_size > 100_000  # the machine code of the step
    assert main(["plan", "compare", *[str(folder / "reported.json")] * 2]) == 0
    assert "matmul" in capsys.readouterr().out


DECODED = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "64",
    "--model.num_layers", "1", "--model.hidden_dim", "128", "--model.intermediate_dim", "128",
    "--model.num_heads", "16", "--model.num_kv_heads", "16", "--model.head_dim", "128",
    "--model.environment", "{max_atoms: 16}", "--density_dropout", "0.5",
]  # fmt: skip


@pytest.mark.slow
def test_a_planned_decoder_runs_its_loop_for_each_voxel(cache, tmp_path, capsys):
    """Each time over all keys and all values, 67 MB each, of which the memory on the chip holds one."""
    path = tmp_path / "decoded.yaml"
    path.write_text(yaml.safe_dump(load_config(None, DECODED).to_dict()))
    words = ["plan", "--config_path", str(path), "--slice", "v6e-1", "--cache_dir", str(cache)]
    words += ["--decode", "autoregressive", "--grid", "15", "16", "18", "--atoms", "2"]
    report = reported(tmp_path, *words)
    assert_keys_of_before("plan --decode", report)
    plan = report["decoders"]["autoregressive"]
    assert report["patches"] == 27 and report["patch_shape_voxels"] == [7, 7, 7]
    assert (plan["patches_at_a_time"], plan["batches"], plan["fits"], plan["cached"]) == (32, 1, True, False)
    batch, whole = plan["batch_seconds"], plan["cell_seconds"]
    assert 0 < batch["low"] < batch["estimate"] == whole["estimate"] < whole["high"]
    ops = plan["breakdown"]["ops"]
    looped = [op for op in ops if op["occurrences"] == 343]
    kept_bytes = 512 * 16 * 128 * 2 * plan["patches_at_a_time"]
    attended_bytes = sum(op["hbm_bytes"] or 0 for op in looped if op["category"] == "attention forward")
    assert 0.95 < attended_bytes / (343 * kept_bytes) < 2.05
    assert sum(op["seconds"] for op in looped) > 0.9 * batch["estimate"]
    assert not [one for one in plan["assumed"] if one["kind"] == "trip_count_not_found"]
    assert "27 patches of 7 x 7 x 7" in capsys.readouterr().out
    assert reported(tmp_path, *words)["decoders"]["autoregressive"] == {**plan, "cached": True}


@pytest.mark.parametrize(
    ("words", "slice_name", "says"),
    [([], None, "--slice"), ([], "h100x8", "not a TPU slice"),
     (["--trainer.train_batch_size", "6"], "v6e-4", "multiple of 4"),
     (["--trainer.mesh.axes", "{data: 3}"], "v6e-4", "trainer.mesh")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_before_a_compile(words, slice_name, says, tmp_path):
    config = load_config(None, [*SMALL, *words])
    with pytest.raises(TomatError, match=says):
        compile_step(config, planned_slice(config, slice_name), cache_dir=tmp_path)


@pytest.mark.slow
def test_a_decoder_of_levanters_is_planned_with_the_attention_that_it_takes_on_a_tpu(cache):
    llama = ["--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "256",
             "--model.type", "llama", "--model.num_layers", "1", "--model.hidden_dim", "128", "--model.num_heads", "1",
             "--model.num_kv_heads", "1", "--model.intermediate_dim", "128",
             "--trainer.train_batch_size", "4"]  # fmt: skip
    config = load_config(None, llama)
    assert config.model.attn_backend is None  # by Levanter: splash on a TPU, JAX's flash on the CPU that lowers
    step = compile_step(config, planned_slice(config, "v6e-4"), cache_dir=cache)
    kernels = {op.custom_call_target for op in step.made[0].by_name.values()}
    assert "tpu_custom_call" in kernels
