"""A trained run as a predictor: whole cells, nothing of the truth, and what it refuses."""

import asyncio
import dataclasses
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pymatgen.core import Structure
from tiny_run import DEMO

import tomat
from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference import decoding
from tomat.predict.inference.decoding import (
    batches,
    can_predict,
    cell_patches,
    check_decoder,
    chosen_bins,
    quantile_bin,
    sequence_keys,
)
from tomat.predict.inference.interface import Choice, check_decoding
from tomat.predict.inference.predictor import RunPredictor, described, load
from tomat.predict.inference.trained import outside_event_loop
from tomat.train.run import train
from tomat.train.settings.config import load_config

CRYSTAL = Crystal(
    np.array([[2.9, 0.1, 0.0], [0.0, 3.3, 0.2], [0.3, 0.0, 3.7]]), np.array([11, 9]),
    np.array([[0.0, 0.0, 0.0], [0.5, 0.52, 0.5]]), "NaF",
)  # fmt: skip
ROOT = Path(__file__).parents[3]
SHAPE = (15, 16, 18)
"""No multiple of the patch's 7 voxels."""


@pytest.fixture(scope="module")
def trained(run_dir) -> RunPredictor:
    return load(str(run_dir))


@pytest.fixture(scope="module")
def prediction(trained) -> np.ndarray:
    return trained.predict(CRYSTAL, SHAPE, electrons=8.0).rho


def test_a_prediction_is_a_whole_density(trained, prediction):
    told = []
    result = trained.predict(CRYSTAL, SHAPE, electrons=8.0, on_patches=lambda *each: told.append(each))
    assert np.array_equal(result.rho, prediction) and prediction.shape == SHAPE and prediction.min() >= 0
    assert result.electron_count == pytest.approx(8.0, rel=1e-6)
    assert told[-1] == (27, 27) and result.seconds > 0
    atoms = trained.promolecule.density(CRYSTAL, SHAPE)
    assert np.abs(prediction - atoms).sum() / atoms.sum() < 0.5, "three steps from the promolecule"
    assert trained.valences[11] == 1 and trained.valences[9] == 7 and 0.05 < trained.spacing_a < 0.07
    assert trained.elements == trained.promolecule.elements and trained.promolecule.shortest_distance_a[9, 11] < 2.4
    assert "run demo step 2" in trained.identity


def test_patches_tile_the_cell(trained):
    patches = cell_patches(trained.run, CRYSTAL, SHAPE)
    index = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    wrapped = [
        index[np.ix_(*[(a + np.arange(p)) % n for a, p, n in zip(anchor, patches.patch_shape, SHAPE, strict=True)])]
        for anchor in patches.anchors
    ]
    assert np.array_equal(patches.assembled(np.stack(wrapped).reshape(len(wrapped), -1)), index)
    sizes = [(real, len(batch["tokens"])) for real, batch in batches(patches.arrays, 16)]
    assert sizes == [(16, 16), (11, 16)]


def test_of_a_relative_codec_it_is_the_promolecule_times_what_the_bins_say(trained):
    run = trained.run
    assert run.promolecule is not None
    histogram = RatioHistogram(run.promolecule)
    histogram.add_grid(load_demo(demo_materials("train")[0].material_id))
    codec = fit_codec(histogram, run.codec.n_density_tokens)
    predictor = RunPredictor(dataclasses.replace(run, codec=codec))
    atoms = run.promolecule.density(CRYSTAL, SHAPE)
    rho, _ = predictor.density(CRYSTAL, SHAPE)
    assert rho.min() >= 0 and 0 < np.abs(rho - atoms).sum() / atoms.sum() < 0.5
    ratios = (rho + 0.01) / (atoms + 0.01)
    assert codec.medians[0] <= ratios.min() * (1 + 1e-4) and ratios.max() <= codec.medians[-1] * (1 + 1e-4)
    assert codec.sha256 in predictor.identity


def test_rounds_read_the_round_before_and_a_patch_does_not_depend_on_its_batch(trained, prediction, monkeypatch):
    again = RunPredictor(trained.run, rounds=2).predict(CRYSTAL, SHAPE, electrons=8.0).rho
    assert 0 < np.abs(again - prediction).sum() / prediction.sum() < 0.5
    monkeypatch.setattr(decoding, "MOST_SEQUENCES", {"parallel": 5, "autoregressive": 5})
    monkeypatch.setattr(decoding, "BLOCK_VOXELS", 100)
    other = RunPredictor(trained.run, rounds=2).predict(CRYSTAL, SHAPE, electrons=8.0).rho
    assert np.allclose(other, again, rtol=2e-5, atol=1e-6)


def test_moving_all_atoms_moves_the_density(trained, prediction):
    """By whole voxels, so that the patches of one are not those of the other."""
    moved = dataclasses.replace(CRYSTAL, frac_coords=CRYSTAL.frac_coords + np.array([4, -3, 7]) / SHAPE)
    rolled = np.roll(trained.predict(moved, SHAPE, electrons=8.0).rho, (-4, 3, -7), axis=(0, 1, 2))
    # A three-step model's attention looks at where in the patch a voxel is, and a little at the rounded preamble.
    assert np.abs(rolled - prediction).sum() / prediction.sum() < 0.05


PREDICTS = """
import sys
from tomat.app.cli import main
status = main(sys.argv[1:])
heavy = sorted({"jax", "levanter", "haliax", "equinox"} & set(sys.modules))
print(status, len([name for name in sys.modules if name.split(".")[0] == "tomat"]), *heavy)
"""
MOST_MODULES = 70
"""Of tomat's, that a process has imported which has predicted with a run; it was 98."""


def predicts(*words: str) -> tuple[str, int, int, list[str]]:
    """Standard output of a `tomat predict` of its own, its exit status, and what it has imported at the end: how many
    modules of tomat, and which of the large packages."""
    done = subprocess.run([sys.executable, "-c", PREDICTS, *words], capture_output=True, text=True, timeout=600)
    status, modules, *heavy = done.stdout.splitlines()[-1].split()
    return done.stdout, int(status), int(modules), heavy


def test_structures_and_known_outputs_are_looked_at_before_the_model(run_dir, tmp_path):
    """A call with nothing left to predict imports no JAX, and one with something finds what is refused before it."""
    (tmp_path / "in").mkdir()
    good = Structure(CRYSTAL.lattice, ["Na", "F"], CRYSTAL.frac_coords)
    good.to(filename=str(tmp_path / "in" / "good.cif"))
    over = Structure(CRYSTAL.lattice, ["Na", "F"], [[0, 0, 0], [0.05, 0, 0]])
    over.to(filename=str(tmp_path / "in" / "over.cif"))
    words = ["predict", "--run", str(run_dir), "--structure", str(tmp_path / "in"), "--grid", "9", "8", "7"]
    words += ["--output", str(tmp_path / "out")]
    told, status, modules, heavy = predicts(*words)
    assert status == 1 and heavy and modules <= MOST_MODULES, modules
    assert told.index("over: failed") < told.index("loading the model")
    again, status, _, heavy = predicts(*words)
    assert status == 1 and not heavy
    assert "good: already there" in again and "loading the model" not in again


def test_the_examples_of_the_guide_run(run_dir, tmp_path, monkeypatch):
    """All but the plan, which `tests/perf/plan/test_plan.py` has."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(run_dir)
    Structure(CRYSTAL.lattice, ["Na", "F"], CRYSTAL.frac_coords).to(filename=str(tmp_path / "POSCAR"))
    shutil.copy(ROOT / "tests" / "fixtures" / "profiles" / "v6e_step.hlo.pb.gz", tmp_path / "step.hlo.pb.gz")
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    found: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", guide, flags=re.MULTILINE | re.DOTALL):
        if "tomat.plan(" not in block:
            exec(block, found)
    alone, spacing_a = found["density"], found["predictor"].spacing_a  # as nothing was said of grid and electrons
    assert isinstance(alone, DensityGrid) and alone.electron_count == pytest.approx(8.0, rel=1e-6)
    assert 0.8 * spacing_a < max(alone.spacing_a) <= 1.001 * spacing_a
    assert found["coarse"].rho.shape == (9, 8, 7) and found["again"].grid_shape == found["density"].grid_shape
    assert 0 < found["figures"]["mfu_full"] < 1 and found["breakdown"].step_seconds > 0
    names = {"DensityGrid", "Promolecule", "load", "mfu", "open_density", "plan", "profile"}
    assert names <= set(re.findall(r"tomat\.(\w+)", guide)) and names <= set(dir(tomat))
    with pytest.raises(AttributeError, match="it offers DensityGrid"):
        tomat.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_tomat_alone_imports_nothing():
    """In less than 50 ms, which a package of others would take."""
    code = "import sys; before = set(sys.modules); import tomat; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = set(re.findall(r"'(\w+)", done.stdout))
    assert new <= {"tomat", "importlib", "warnings", "_warnings"}, new


def test_a_run_is_described_by_the_identity_that_it_loads_with(run_dir, trained, tmp_path):
    assert described(run_dir).identity == trained.identity
    drawn = {"decoder": "autoregressive", "samples": 3, "seed": 4, "kv_cache_dtype": "int8"}
    assert described(str(run_dir), **drawn).identity == load(str(run_dir), **drawn).identity
    found = described(run_dir)
    for name in ("elements", "spacing_a", "valences", "usual_deviation"):
        assert getattr(found, name) == getattr(trained, name), name
    assert found.promolecule.void_radius_a == pytest.approx(3.0224, abs=1e-3), "SrCl2's, of the embedded training cells"
    with pytest.raises(TomatError, match="has Xe"):
        found.predict(dataclasses.replace(CRYSTAL, atomic_numbers=np.array([54, 9])), SHAPE)
    assert found._run is None, "a structure is looked at before the model is loaded"
    assert main(["export", "--run", str(run_dir), "--output", str(tmp_path / "weights")]) == 0
    assert described(tmp_path / "weights").identity == load(str(tmp_path / "weights")).identity
    with pytest.raises(TomatError, match="holds the weights of step 2 alone; leave out --step 1"):
        described(tmp_path / "weights", step=1)
    with pytest.raises(TomatError, match="the parallel one has one answer"):
        described(run_dir, samples=2)


def test_what_cannot_be_predicted_is_refused(trained):
    run = trained.run
    blind = dataclasses.replace(run, config=dataclasses.replace(run.config, density_dropout=0.0))
    plain_model = dataclasses.replace(run.config.model, environment=None)
    plain = dataclasses.replace(run, config=dataclasses.replace(run.config, model=plain_model))
    for other, words in ((blind, "was trained with density_dropout 0"), (plain, "has no model.environment")):
        assert not can_predict(other)
        with pytest.raises(TomatError, match=words):
            RunPredictor(other)
    without = dataclasses.replace(run, promolecule=None)
    with pytest.raises(TomatError, match=r"no promolecule\.json beside its codec"):
        RunPredictor(without)
    unread = dataclasses.replace(run, config=dataclasses.replace(run.config, density_dropout=1.0))
    with pytest.raises(TomatError, match="never read a density"):
        check_decoder(unread.config, "autoregressive")
    with pytest.raises(TomatError, match="samples is for the autoregressive and"):
        load("nowhere", samples=2)


def test_a_run_goes_on_with_its_own_promolecule_alone(run_dir, run_words, tmp_path):
    shutil.copytree(run_dir.parent, tmp_path / "runs")
    path = tmp_path / "runs" / run_dir.name / "promolecule.json"
    before = Promolecule.load(path)
    path.write_text(dataclasses.replace(before, n_materials=before.n_materials + 1).to_text())
    config = load_config(DEMO, run_words(tmp_path / "runs"))
    with pytest.raises(TomatError, match="promolecule .* another run_name"):
        train(config)


FOUR = (9, 8, 7)
"""A grid of four patches."""


def bin_values(trained: RunPredictor) -> np.ndarray:
    codec = trained.run.codec
    return codec.decode(np.arange(codec.n_density_tokens), "mean").astype(np.float32)


def test_samples_have_a_mean_and_a_spread_and_can_be_had_again(run_dir, trained, capsys):
    drawn = load(str(run_dir), decoder="autoregressive", samples=3, seed=4)
    told = []
    three = drawn.predict(CRYSTAL, FOUR, electrons=None, on_patches=lambda *each: told.append(each))
    assert told[-1] == (12, 12), "four patches, three samples"
    again = drawn.predict(CRYSTAL, FOUR, electrons=10.0, accept=("normalisation",))
    said = capsys.readouterr().out
    assert said.count("autoregressive decoder: 32 patches of 343 voxels at a time on 2 devices") == 1
    assert three.spread is not None and again.spread is not None
    assert three.spread.shape == FOUR and (three.spread > 0).any()
    scale = 10.0 / three.electrons_before
    np.testing.assert_allclose(again.rho, three.rho * scale, rtol=1e-5)
    np.testing.assert_allclose(again.spread, three.spread * scale, rtol=1e-5)
    assert "sampled, 3 samples, temperature 1, seed 4" in drawn.identity
    one = RunPredictor(trained.run, 1, "autoregressive", Choice("sampled", seed=4))
    first = one.predict(CRYSTAL, FOUR, electrons=None)
    assert first.spread is None and np.isin(first.rho, bin_values(trained)).all()
    rest = 3 * three.rho - first.rho  # the first sample of three is that of one: two bins remain
    assert (np.abs(rest[..., None] - np.add.outer(*[bin_values(trained)] * 2).ravel()).min(axis=-1) < 1e-4).all()


def test_the_autoregressive_decoder_predicts_whole_cells_too(trained):
    median = RunPredictor(trained.run, 1, "autoregressive").predict(CRYSTAL, FOUR, electrons=8.0)
    atoms = trained.promolecule.density(CRYSTAL, FOUR)
    assert np.abs(median.rho - atoms).sum() / atoms.sum() < 0.5, "three steps from the promolecule"
    compact = RunPredictor(trained.run, 1, "autoregressive", kv_cache_dtype="int8")
    assert compact.identity.endswith(f"autoregressive, {compact.choice}, kv_cache_dtype int8")
    nearly = compact.predict(CRYSTAL, FOUR, electrons=8.0).rho
    assert np.abs(nearly - median.rho).sum() / median.rho.sum() < 0.01


def test_a_batch_is_halved_until_it_fits_into_memory(trained, prediction, monkeypatch, capsys):
    size, program = next(iter(trained._programs.values()))
    memory = program.compiled.memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes
    monkeypatch.setattr(decoding, "free_bytes", lambda: needed)  # of which nine tenths are taken
    half = RunPredictor(trained.run)
    np.testing.assert_allclose(half.predict(CRYSTAL, SHAPE, electrons=8.0).rho, prediction, rtol=2e-5, atol=1e-6)
    assert "parallel decoder: 16 patches of 343 voxels" in capsys.readouterr().out and size == 32
    monkeypatch.setattr(decoding, "free_bytes", lambda: 1000)
    monkeypatch.setattr(decoding, "MOST_SEQUENCES", {"parallel": 1, "autoregressive": 1})
    with pytest.raises(TomatError, match="decoding 2 patches at a time takes"):
        RunPredictor(trained.run).predict(CRYSTAL, SHAPE, electrons=8.0)


async def in_a_notebook(work):
    return outside_event_loop(work)


def test_a_loop_is_started_with_and_without_another():
    async def answer():
        return threading.current_thread()

    def work():
        return asyncio.run(answer())

    assert outside_event_loop(work) is threading.current_thread()
    assert asyncio.run(in_a_notebook(work)) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_a_notebook(lambda: 1 / 0))


P = np.array([0.05, 0.0, 0.4, 0.25, 0.3], np.float32)


def test_a_share_of_the_weight_is_reached_by_its_bin_and_not_before():
    shares = jnp.array([1e-9, 0.05, 0.06, 0.45, 0.46, 1.0], jnp.float32)
    np.testing.assert_array_equal(quantile_bin(jnp.tile(jnp.asarray(P), (6, 1)), shares), [0, 0, 2, 2, 3, 4])


def test_bins_are_drawn_as_often_as_they_are_probable():
    n = 20_000
    keys = sequence_keys(jnp.uint32(3), jnp.arange(n), jnp.zeros(n, jnp.int32))
    logits = jnp.tile(jnp.log(jnp.asarray(P)), (n, 1))

    def drawn(temperature: float, voxel: int) -> np.ndarray:
        return np.asarray(jax.jit(chosen_bins, static_argnums=1)(logits, "sampled", temperature, keys, voxel))

    for temperature in (1.0, 0.5):
        expected = P ** (1 / temperature) / np.sum(P ** (1 / temperature))
        found = np.bincount(drawn(temperature, 0), minlength=5) / n
        np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / n))
        assert found[1] == 0
    assert (drawn(1.0, 0) != drawn(1.0, 1)).any() and (drawn(1e-6, 0) == 2).all(), "the most probable"
    assert (np.asarray(chosen_bins(logits[:2], "greedy", jnp.float32(1), keys[:2], jnp.int32(0))) == 2).all()
    assert (np.asarray(chosen_bins(logits[:2], "median", jnp.float32(1), keys[:2], jnp.int32(0))) == 3).all()


def test_a_choice_that_makes_no_sense_is_refused():
    for fields in (dict(kind="mean"), dict(samples=0), dict(kind="sampled", temperature=0.0), dict(temperature=2.0)):
        with pytest.raises(TomatError):
            Choice(**fields)  # pyright: ignore[reportArgumentType]


def test_what_no_run_can_be_decoded_with_is_refused_by_name_before_a_model_is_loaded():
    check_decoding("autoregressive", 1, "int8")
    check_decoding("parallel", 2, "compute")
    for words, message in (
        (("parallel", 1, "int8"), "kv_cache_dtype is int8, but the parallel decoder keeps no keys and values"),
        (("autoregressive", 1, "int4"), "kv_cache_dtype is 'int4'; expected one of compute, int8"),
        (("autoregressive", 2, "compute"), "rounds is 2"),
        (("serial", 1, "compute"), "decoder is 'serial'"),
    ):
        with pytest.raises(TomatError, match=message):
            check_decoding(*words)
