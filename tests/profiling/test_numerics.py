"""The study of numerics on a decoder of one layer: a real run, and others made of it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from forked import instead_of_starting
from numerics import build_parser, load_variants
from tiny_run import DEMO, tiny_run

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.measure.lab import quality
from tomat.measure.lab.quality import Quality

STEPS = 20
SHIPPED = Path(__file__).parents[2] / "configs" / "numerics" / "demo.yaml"
HEADS = ["--model.num_heads", 1, "--model.num_kv_heads", 1]
VARIANTS = {
    "name": "tiny",
    "overrides": [*tiny_run(STEPS, 4), "--evaluation.patches_per_material", 1, "--evaluation.picture", False],
    "config_path": str(DEMO),
    "window_steps": 5,
    "variants": [
        {"name": "blocks", "exact": True, "reason": "the same sums", "overrides": {"loss.block_positions": 64}},
        {"name": "one-head", "exact": False, "reason": "wider heads", "overrides": HEADS},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("numerics")
    (place / "tiny.yaml").write_text(yaml.safe_dump(VARIANTS))
    return place


def bench(folder: Path, *words: str) -> int:
    arguments = ["--variants", str(folder / "tiny.yaml"), "--output_dir", str(folder / "runs"), "--seeds", "3,8"]
    return main([*arguments, *words], build_parser())


def copy_run(source: Path, run: Path, settings: dict, factor: float, early: float = 1 + 1e-7) -> None:
    """A run as if it had learnt what another did, but for the loss of the late steps."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run, ignore=shutil.ignore_patterns("data", "checkpoints"))
    config = yaml.safe_load((source / "config.yaml").read_text())
    config["run_name"] = run.name
    for key, value in settings.items():
        section, name = key.split(".")
        config[section][name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["train/loss"] *= factor if row["step"] >= 15 else early
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The base with both seeds, of which one is trained."""
    runs, train_run = folder / "runs", quality.train_run

    def train(run, output_dir, lock):
        if run.seed == 3:
            train_run(run, output_dir, lock)
        else:
            copy_run(runs / "base-seed-3", runs / run.name, {"trainer.seed": run.seed}, 1.01, 1.01)

    with pytest.MonkeyPatch.context() as patch:
        instead_of_starting(patch)
        patch.setattr(quality, "train_run", train)
        assert bench(folder, "--only", "base") == 0
    return folder


def put_runs(folder: Path, variant: str, settings: dict, factor: float) -> None:
    for seed in (3, 8):
        copy_run(folder / "runs" / f"base-seed-{seed}", folder / "runs" / f"{variant}-seed-{seed}", settings, factor)


@pytest.mark.slow
def test_the_page_says_what_is_the_same_and_what_is_not(trained: Path, capsys):
    tracking, report = trained / "tracking", trained / "all.json"
    words = ("--compare_only", "--docs", "--tracking_dir", str(tracking), "--json", str(report))
    put_runs(trained, "blocks", {"loss.block_positions": 64}, 1 + 1e-6)
    put_runs(trained, "one-head", {"model.num_heads": 1, "model.num_kv_heads": 1}, 1.5)
    assert bench(trained, *words) == 0
    blocks, heads = json.loads(report.read_text())["variants"]
    assert blocks["same_curve"] and blocks["first_step_relative_difference"] == pytest.approx(1e-7, rel=1e-3)
    assert blocks["largest_relative_difference"] == pytest.approx(1e-6, rel=1e-3)
    assert not heads["same_curve"] and heads["largest_relative_difference"] == pytest.approx(0.5)
    assert heads["parameters"] - blocks["parameters"] == 2 * (32 - 16)  # the norms of queries and keys
    assert heads["held_out_nmae_median"]["difference_mean"] == 0  # the evaluations are copies
    page = tracking / "tiny.md"
    text = page.read_text()
    assert "| the same |" in text and "| not the same |" not in text and "not trained yet" not in text
    assert json.loads((tracking / "tiny.json").read_text()) == json.loads(report.read_text())
    page.write_text(text + "\nWritten by hand.\n")

    put_runs(trained, "blocks", {"loss.block_positions": 64}, 1.5)
    assert bench(trained, *words) == 1
    changed = page.read_text()
    assert "| not the same |" in changed and changed.endswith("\nWritten by hand.\n")
    assert bench(trained, "--only", "base", "--steps", "10") == 2
    assert "base-seed-3 holds a run with other settings (trainer.num_train_steps)" in capsys.readouterr().err


ONE = VARIANTS["variants"][0]


def study(path: Path, folder: Path, steps: int | None = None) -> Quality:
    return Quality(load_variants(path), [0, 4], folder, folder / "record.json", steps=steps, share=None)


def test_runs_differ_by_variant_and_seed_alone(folder: Path, tmp_path: Path):
    runs = study(folder / "tiny.yaml", tmp_path, 50).plan()
    assert {name: [run.name for run in group] for name, group in runs.items()} == {
        name: [f"{name}-seed-0", f"{name}-seed-4"] for name in ("base", "blocks", "one-head")
    }
    base, heads = runs["base"][1].config, runs["one-head"][1].config
    assert base.trainer.seed == heads.trainer.seed == 4 and base.trainer.num_train_steps == 50
    assert (base.model.num_heads, heads.model.num_heads) == (2, 1) and base.data.source == "embedded"
    assert study(folder / "tiny.yaml", tmp_path).plan()["base"][0].config.trainer.num_train_steps == STEPS
    shipped = study(SHIPPED, tmp_path)
    assert {"all-exact", "save-attention", "loss-blocks-64"} <= {row.name for row in shipped.sweep.rows if row.exact}
    assert shipped.plan()["1x128"][0].config.model.num_heads == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": [{**ONE, "reason": ""}]}, "other.yaml.*blocks has no reason"),
        ({"variants": [{"name": "a", "reason": "b"}]}, "other.yaml.*exact"),
        ({"variants": [{**ONE, "overrides": {"model.sliding_window": 8}}]}, "is called exact, but changes what is"),
        ({"overrides": tiny_run(STEPS, 4)}, "evaluation.patches_per_material 0; expected embedded"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_is_trained(folder: Path, tmp_path: Path, changes, message):
    path = folder / "other.yaml"
    path.write_text(yaml.safe_dump({**VARIANTS, **changes}))
    with pytest.raises(TomatError, match=message):
        study(path, tmp_path).plan()
