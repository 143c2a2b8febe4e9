"""A table of published runs, read as steps to plan."""

import csv
from datetime import date

import pytest

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.model.shape import decoder_shape
from tomat.perf.tuning.published_runs import (
    FUSED_LOSS,
    OPTIMIZERS,
    REFUSED,
    SPLASH_ANY_HEAD,
    keep_runs,
    kept_runs,
    published_sweep,
    read_published_runs,
)
from tomat.report.pages.sweep_pages import write_published_page

ROW = {
    "id": "small", "source": "a file", "date": "2025-06-27", "family": "llama", "num_layers": 6, "hidden_dim": 512,
    "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "intermediate_dim": 1792, "vocab": 128256, "tied": "false",
    "seq_len": 4096, "batch": 128, "chip": "v5p", "slice": "v5p-32", "num_chips": 16, "gradient_checkpointing": "true",
    "optimizer": "adamw", "qk_norm": "false", "hybrid_norm": "false", "steps": 1000, "training_time_s": 250.0,
    "step_seconds": 0.25, "notes": "", "tokens_per_second": 1,
}  # fmt: skip


@pytest.fixture
def table(tmp_path):
    """Writes a table with such rows: ROW with what differs."""

    def write(*differing, columns=tuple(ROW)):
        path = tmp_path / "runs.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**ROW, "id": f"run-{n}", **row} for n, row in enumerate(differing))
        return path

    return write


def test_every_optimizer_and_family_becomes_a_configuration_of_that_step(table):
    families = {"qwen3": "qwen3", "hackable": "llama", "llama": "llama"}
    rows = [{"optimizer": name, "family": list(families)[n % 3]} for n, name in enumerate(OPTIMIZERS)]
    rows.append({"hybrid_norm": "true", "qk_norm": "true(record)", "slice": "v5p-8", "num_chips": 4, "head_dim": 32})
    runs, wrong = read_published_runs(table(*rows))
    assert not wrong and not any(run.refused for run in runs)
    sweep = published_sweep(runs)
    for row, asked in zip(sweep.rows, rows, strict=True):
        config, slice_ = row.load()
        assert config.seq_len == 4096 and config.batch_size == 128 and config.data.model_vocabulary == 128256
        assert config.trainer.num_train_steps == 1000 and slice_.name == asked.get("slice", "v5p-32")
        kind = config.model.get_choice_name(type(config.model))
        assert kind == families[asked.get("family", "llama")]
        shape = decoder_shape(config.model_config(), config.data.model_vocabulary)
        assert shape.head_dim == asked.get("head_dim", 64)
    last = sweep.rows[-1].load()[0]
    assert last.model.use_qk_norm and last.model.hybrid_norm


def test_levanter_is_that_of_the_day(table):
    before, after = "2025-06-01", "2026-04-01"
    assert date.fromisoformat(before) < SPLASH_ANY_HEAD < FUSED_LOSS < date.fromisoformat(after)
    wide = {"hidden_dim": 1024, "head_dim": 128}
    old, new, old_wide = read_published_runs(table({"date": before}, {"date": after}, {"date": before, **wide}))[0]
    assert old.overrides["model.attn_backend"] == "jax_flash" and old.overrides["loss.block_positions"] == 4096
    assert new.overrides["model.attn_backend"] == "splash" and new.overrides["loss.kernel"] == "levanter"
    assert old_wide.overrides["model.attn_backend"] == "splash" and "loss.kernel" not in old_wide.overrides
    assert "JAX flash" in old.assumed and "fused" in new.assumed and "heads" not in old_wide.assumed
    # A shape is kept aside whole, whoever trained it and when.
    assert old.kept_aside == new.kept_aside


def test_runs_that_do_the_same_have_one_step_whether_they_are_planned_or_not(table):
    rows = [{}, {"optimizer": "adamc"}, {"optimizer": "muon"}, {"slice": "v5p-64", "num_chips": 32}]
    rows += [{"family": "hackable_attn_gate"}] * 2
    plain, same, *others, gates, gates_again = (run.step for run in read_published_runs(table(*rows))[0])
    assert plain == same and gates == gates_again
    assert len({plain, *others, gates}) == 4


def test_what_cannot_be_planned_says_why_and_stays_in_the_list(table):
    gpu = {"chip": "H200", "slice": "8xH200", "num_chips": 8}
    rows = [gpu, {"optimizer": "adamuon"}, {"family": "mamba"}, *({"family": family} for family in REFUSED)]
    runs, wrong = read_published_runs(table(*rows))
    assert not wrong and all(run.refused and not run.overrides for run in runs) and len(runs) == len(rows)
    assert "GPU" in runs[0].refused and "adamuon" in runs[1].refused and "mamba" in runs[2].refused
    assert published_sweep(runs).rows == ()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"step_seconds": 250}, "the same seconds"),
        ({"num_kv_heads": 3}, "do not divide"),
        ({"steps": 0}, "steps is '0'"),
        ({"steps": ""}, "steps is ''"),
        ({"num_chips": 32}, "a v5p-32 has 16"),
        ({"date": "June"}, "YYYY-MM-DD"),
        ({"slice": "v5p-31"}, "v5p-31"),
        ({"chip": "v9", "slice": "v9-8"}, "v9-8"),
        ({"chip": "", "slice": "none"}, "'none' is not known"),
        ({"id": "run-0"}, "run-0 too"),
    ],
)
def test_a_row_that_cannot_be_is_one_line_and_the_others_count(table, row, said):
    runs, wrong = read_published_runs(table({}, row))
    lines = [*wrong, *(run.refused for run in runs if run.refused)]
    assert len(lines) == 1 and said in lines[0] and "\n" not in lines[0]
    assert [run.id for run in runs if not run.refused] == ["run-0"]


def test_a_table_of_another_kind_is_refused(table, tmp_path, capsys):
    with pytest.raises(TomatError, match="no row that can be used"):
        read_published_runs(table())
    path = table({}, columns=("id", "source"))
    with pytest.raises(TomatError, match="no column date"):
        read_published_runs(path)
    assert main(["plan", "--runs", str(path), "--tracking_dir", str(tmp_path / "t")]) == 2
    assert "no column" in capsys.readouterr().err and not (tmp_path / "t").exists()
    assert main(["plan", "--runs", str(path), "--sweep", "mfu-200m"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_the_record_of_a_table_is_read_as_it_was_kept(table, tmp_path):
    runs, _ = read_published_runs(table({}, {"family": "mamba"}))
    assert kept_runs(tmp_path) == []
    keep_runs(tmp_path, runs)
    assert kept_runs(tmp_path) == runs
    page, report = write_published_page(tmp_path)
    assert report.figures == {"rows": 2, "planned": 0} and "mamba" in page.read_text()
