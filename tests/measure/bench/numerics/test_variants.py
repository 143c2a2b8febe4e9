"""Files of variants. About 10 seconds, most of them the import of JAX."""

from pathlib import Path

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.measure.bench.numerics.variants import BASE, load_variants, plan_runs

ROOT = Path(__file__).parents[4]
GOOD = {
    "name": "mine",
    "config_path": "demo.yaml",
    "overrides": {"trainer.num_train_steps": 30},
    "variants": [{"name": "unrolled", "exact": True, "reason": "same", "overrides": {"model.scan_layers": False}}],
}


def written(folder: Path, **changes) -> Path:
    path = folder / "variants.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": []}, "no variants"),
        ({"variants": [{**GOOD["variants"][0], "name": "a b"}]}, "variant 'a b'"),
        ({"variants": [{**GOOD["variants"][0], "reason": " "}]}, "unrolled has no reason"),
        ({"variants": GOOD["variants"] * 2}, "more than one variant is called 'unrolled'"),
        ({"variants": [{**GOOD["variants"][0], "name": BASE}]}, "more than one variant is called 'base'"),
        ({"variants": [{**GOOD["variants"][0], "overrides": 3}]}, "variant unrolled has overrides 3"),
        ({"variants": [{"name": "a", "reason": "b"}]}, "exact"),
        ({"name": "a/b"}, "it names files"),
        ({"window_steps": 0}, "window_steps is 0"),
        ({"first_step_tolerance": 1.0}, "first_step_tolerance is 1.0"),
        ({"seeds": 3}, "seeds"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, changes: dict, message: str):
    path = written(tmp_path, **changes)
    with pytest.raises(TomatError, match=message) as raised:
        load_variants(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(TomatError, match="does not exist"):
        load_variants(tmp_path / "none.yaml")


def test_runs_differ_by_variant_and_seed_alone(tmp_path: Path):
    (tmp_path / "demo.yaml").write_text("preset: demo\noptimizer: {warmup: 0.1}\n")
    runs = plan_runs(load_variants(written(tmp_path)), [0, 4], 50, tmp_path / "runs")
    assert {name: [run.name for run in group] for name, group in runs.items()} == {
        "base": ["base-seed-0", "base-seed-4"],
        "unrolled": ["unrolled-seed-0", "unrolled-seed-4"],
    }
    base, unrolled = runs["base"][1].config, runs["unrolled"][1].config
    assert base.trainer.seed == unrolled.trainer.seed == 4 and base.trainer.num_train_steps == 50
    assert base.model.scan_layers and not unrolled.model.scan_layers
    assert (
        plan_runs(load_variants(written(tmp_path)), [0], None, tmp_path)["base"][0].config.trainer.num_train_steps == 30
    )


def test_what_changes_what_is_learnt_cannot_be_called_exact(tmp_path: Path):
    (tmp_path / "demo.yaml").write_text("preset: demo\n")
    variant = {"name": "window", "exact": True, "reason": "no", "overrides": {"model.sliding_window": 8}}
    numerics = load_variants(written(tmp_path, variants=[variant]))
    with pytest.raises(TomatError, match="window is called exact, but changes what is learnt: model.sliding_window"):
        plan_runs(numerics, [0, 1], None, tmp_path)


def test_runs_without_an_evaluation_are_refused(tmp_path: Path):
    (tmp_path / "demo.yaml").write_text("preset: demo\nevaluation: {patches_per_material: 0}\n")
    with pytest.raises(TomatError, match="evaluation.patches_per_material 0; expected embedded and at least 1"):
        plan_runs(load_variants(written(tmp_path)), [0, 1], None, tmp_path)


def test_the_variants_that_ship_can_be_planned(tmp_path: Path):
    numerics = load_variants(ROOT / "configs" / "numerics" / "demo.yaml")
    runs = plan_runs(numerics, [0], None, tmp_path)
    exact = {variant.name for variant in numerics.variants if variant.exact}
    assert {"all-exact", "save-attention", "loss-blocks-64"} <= exact
    assert runs["1x128"][0].config.model.num_heads == 1
    # A fraction of the run, so that the schedule scales with its steps.
    assert 0 < runs[BASE][0].config.optimizer.warmup < 1
