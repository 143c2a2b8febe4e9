"""A run is resumed after another data set, with the same codec and layout, was put at the place of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tomat.app.cli import main
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.writer import write_shards
from tomat.train.runs.log_lines import read_metrics

TINY = [
    "--run_name", "resumed", "--preset", "demo", "--data.layout", "v3-p7", "--data.n_density_tokens", "64",
    "--model.num_layers", "1", "--model.hidden_dim", "32", "--model.intermediate_dim", "64", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--trainer.train_batch_size", "4", "--trainer.num_train_steps", "60",
    "--trainer.max_eval_batches", "0", "--evaluation.patches_per_material", "0", "--evaluation.free_running", "false",
    "--trainer.checkpointer.keep", "[{every: 50, until: null}]",
]  # fmt: skip


def tokenise(place: Path, seed: int) -> None:
    """The first eight materials; another seed draws other patches of them."""
    names = [material.material_id for material in demo_materials("train")][:8]
    histogram = DensityHistogram()
    for name in names:
        histogram.add(load_demo(name).rho)
    codec = fit_lloyd_max(histogram, n_bins=64)
    write_shards(place, names, load_demo, layout=LAYOUTS["v3-p7"], codec=codec, patches_per_material=4, seed=seed)


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in read_metrics(run / "metrics.jsonl")}


@pytest.mark.parametrize("replaced", ["train", "validation"])
def test_another_set_at_the_same_place(tmp_path, figure: Callable[[str, str, object], None], capsys, replaced):
    for split in ("train", "validation"):
        tokenise(tmp_path / split, seed=0)
    (tmp_path / "empty.yaml").write_text("{}\n")
    words = ["train", "--config_path", str(tmp_path / "empty.yaml"), *TINY, "--output_dir", str(tmp_path / "runs")]
    words += ["--data.train", str(tmp_path / "train"), "--data.validation", str(tmp_path / "validation")]
    run = tmp_path / "runs" / "resumed"
    assert main(words) == 0
    before = losses(run)
    shutil.rmtree(run / "checkpoints" / "step-59")

    shutil.rmtree(tmp_path / replaced)
    tokenise(tmp_path / replaced, seed=1)
    capsys.readouterr()
    status = main(words)
    figure("A3", f"exit status of a resume at step 51 on another set at the place of data.{replaced}", status)
    after = losses(run)
    changed = sum(after[step] != before[step] for step in before)
    figure("A3", f"steps trained after the set of data.{replaced} was exchanged, with another loss", changed)
    assert status == 2
    assert after == before
    assert f"data.{replaced}" in capsys.readouterr().err
