import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.hardware.flops import ModelShape, levanter_training_flops, training_products
from tomat.report.pages.report import flatten, read_record, write_index, write_run_page

TRACKING = Path(__file__).parents[3] / "docs" / "tracking"
CONFIG = {"run_name": "r1", "preset": "demo", "slice": "v6e-4"}
CONFIG |= {"trainer": {"train_batch_size": 8}, "data": {"seq_len": 512}}
MFU = {
    "slice": "v6e-4", "step_seconds": 2.0, "mfu_full": 0.25, "mfu_causal": 0.2, "mfu_useful": 0.15,
    "mfu_levanter": 0.26, "hfu": 0.3, "tokens_per_second_per_chip": 512.0, "batch_sequences": 8, "sequence_tokens": 512,
}  # fmt: skip
RUN_MFU = MFU | {
    "n_steps": 10, "n_steady_steps": 9, "wall_seconds": 25.0, "wall_mfu_full": 0.2, "step_mfu_full": 0.25,
    **{f"{k}_{p}": MFU[k] for k in ("step_seconds", "mfu_full") for p in ("p10", "p90")},
    "wall_seconds_by_part": {"device_steps": 20.0, "compile": 5.0}, "wall_mfu_full_lost": {"compile": 0.05},
}  # fmt: skip


def run_folder(tmp_path, name="r1", **changes):
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "run_name": name, **changes}))
    return folder


def snapshot(docs):
    return {p.relative_to(docs): (p.read_bytes(), p.stat().st_mtime_ns) for p in docs.rglob("*") if p.is_file()}


def test_a_page_has_everything_and_twice_changes_nothing(tmp_path, step):
    run, docs = run_folder(tmp_path), tmp_path / "docs"
    page = write_run_page(run, docs, step, RUN_MFU, commit="abc123", date="2026-01-02", config_hash="0123")
    text = page.read_text()
    for heading in ("Hypothesis", "Setup", "Results", "Verdict", "Next"):
        assert f"\n## {heading}\n" in text
    for line in ("| commit | `abc123` |", "| MFU, full attention | 25.00 % | 25.00 % |",
                 "| MFU, causal attention | 20.00 % |", "| compile | 5.000 s | 20.0 % | 5.00 % |",
                 "figures/r1-shares.svg", "### HBM", "### Top operations",
                 "| **step** |", "fusion.2", "| arguments | 0.001 GiB |"):  # fmt: skip
        assert line in text, line
    shares = [float(x) for x in re.findall(r"\| \*\*step\*\* \|.*?\| ([0-9.]+) % \|", text)]
    assert shares == [100.0, 100.0]
    before = snapshot(docs)
    write_run_page(run, docs, step, RUN_MFU, commit="abc123", date="2026-01-02", config_hash="0123")
    assert snapshot(docs) == before


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_a_slice_that_was_asked_for_is_not_taken_for_what_ran(tmp_path, step, kind):
    run, docs = run_folder(tmp_path, slice="v6e-16"), tmp_path / "docs"
    ran = {**MFU, "slice": None, "devices_that_ran": "2 x cpu on 1 host", "notes": ["it ran elsewhere"]}
    page = write_run_page(run, docs, step, ran, kind=kind).read_text()
    record = read_record(docs, "r1")
    if kind == "predicted":  # a plan is of the slice that it is asked for
        assert record["slice"] == "v6e-16" and "asked for" not in page
        return
    assert (record["slice"], record["asked_slice"]) == (None, "v6e-16")
    for line in ("| slice | – |", "| slice that was asked for | v6e-16 |", "| ran on | 2 x cpu on 1 host |"):
        assert line in page
    assert "The chip's peak of 2 x cpu on 1 host is not known" in page and "Note: it ran elsewhere." in page
    assert "v6e" not in (docs / "index.md").read_text()


def test_hand_written_text_survives_and_its_verdict_is_indexed(tmp_path, step):
    run, docs = run_folder(tmp_path), tmp_path / "docs"
    page = write_run_page(run, docs, step, MFU)
    text = page.read_text().replace("## Verdict\n", "## Verdict\n\nFaster by half.\n\nBecause.\n")
    page.write_text(text.replace("# r1\n", "# r1, the first\n\nA preface.\n"))
    write_run_page(run, docs, step, {**MFU, "mfu_full": 0.5})
    after = page.read_text()
    assert "A preface." in after and "Faster by half." in after
    assert "attention | 50.00 % |" in after and "attention | 25.00 %" not in after
    index = (docs / "index.md").read_text()
    assert "| [r1](r1.md) | measured | demo | v6e-4 | 8 | 512 | 2.000 s | 50.0 %" in index
    assert "| Faster by half. |" in index


def test_a_page_written_again_keeps_its_commit_and_date_unless_the_configuration_changed(tmp_path, step):
    run, docs = run_folder(tmp_path), tmp_path / "docs"
    write_run_page(run, docs, step, MFU, commit="abc123", date="2026-01-02", config_hash="0123")
    write_run_page(run, docs, step, MFU, date="2026-01-03")
    found = read_record(docs, "r1")
    assert (found["commit"], found["date"], found["config_hash"]) == ("abc123", "2026-01-03", "0123")
    write_run_page(run_folder(tmp_path / "again", trainer={"train_batch_size": 16}), docs, step, MFU)
    found = read_record(docs, "r1")
    assert (found["commit"], found["date"], found["config_hash"]) == ("", "", "")


def test_the_setup_is_a_diff_against_the_baseline(tmp_path, step):
    docs = tmp_path / "docs"
    write_run_page(run_folder(tmp_path), docs, step, MFU)
    second = run_folder(tmp_path, "r2", trainer={"train_batch_size": 16, "seed": 1})
    page = write_run_page(second, docs, None, None, baseline="r1")
    text = page.read_text()
    assert "| `trainer.train_batch_size` | `8` | `16` |" in text
    assert "| `trainer.seed` | `–` | `1` |" in text and "data.seq_len" not in text
    assert "No profile was taken." in text
    with pytest.raises(TomatError, match="run 'r9' is not on record.*on record: r1, r2"):
        write_run_page(second, docs, None, None, baseline="r9")


def test_broken_markers_of_the_index_write_nothing_at_all(tmp_path, step):
    run, docs = run_folder(tmp_path), tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("<!-- tomat:begin runs -->\n")
    with pytest.raises(TomatError, match="'runs' never ends"):
        write_run_page(run, docs, step, MFU)
    assert [path.name for path in docs.rglob("*")] == ["index.md"]


def test_names_and_records_are_checked(tmp_path, step):
    docs = tmp_path / "docs"
    with pytest.raises(TomatError, match="run name is '../x'"):
        write_run_page(tmp_path, docs, step, None, run_name="../x")
    write_run_page(run_folder(tmp_path), docs, None, MFU)
    record = docs / "data" / "r1.json"
    assert read_record(docs, "r1")["config"] == flatten(CONFIG)
    record.write_text(json.dumps({"record_format": 0}))
    with pytest.raises(TomatError, match="record_format 0; this tomat reads 1"):
        write_index(docs)


def test_the_index_lists_the_reference_runs_with_their_page_in_the_archive(tmp_path):
    for folder in ("data", "archive"):
        shutil.copytree(TRACKING / folder, tmp_path / folder)
    assert write_index(tmp_path).read_text().count("(archive/reference-runs.md) | reference |") == 4


def test_the_mfu_of_the_timed_reference_runs_is_what_tomat_computes_of_their_steps():
    shapes = {"200M": (1024, 4096, 12, 16, 16, 64, 18570), "1B": (2048, 5632, 20, 16, 16, 128, 18570)}
    records = [json.loads(path.read_text()) for path in (TRACKING / "data").glob("*.json")]
    timed = [record for record in records if record["kind"] == "reference" and record["step_seconds"]]
    assert len(timed) == 2
    for record in timed:
        shape, length = ModelShape(*shapes[record["model"]]), record["sequence_tokens"]
        flops = {f"mfu_{kind}": training_products(shape, length, kind).total for kind in ("full", "causal")}
        flops["mfu_levanter"] = levanter_training_flops(shape, length)
        peak = slice_named(record["slice"]).peak_bf16_flops_per_second * record["step_seconds"]
        for key, value in flops.items():
            assert record[key] == pytest.approx(record["batch_sequences"] * value / peak)
        logged = float(record["verdict"].split()[1]) / 100  # by the run itself
        assert record["mfu_levanter"] == pytest.approx(logged, abs=0.001)


@pytest.mark.parametrize(("planned", "said"), [("ab", "2 of 3 planned"), ("abc", "3")])
def test_a_sweep_that_is_not_whole_says_how_many_rows_are_planned(tmp_path, planned, said):
    """Else the rows that nobody planned yet read as rows that do not fit."""
    (tmp_path / "sweeps").mkdir()
    record = {"title": "A sweep", "sweep": "s", "n_rows": 3, "n_fitting": 2, "ranking": ["a", "b"]}
    (tmp_path / "sweeps" / "s.json").write_text(json.dumps(record | {"rows": [{"name": name} for name in planned]}))
    assert f"| [A sweep](s.md) | {said} | 2 | a |" in write_index(tmp_path).read_text()


def test_a_planned_figure_stands_beside_its_range_and_what_of_it_was_never_timed(tmp_path, step):
    span = {"estimate": 0.5, "low": 0.4, "high": 0.6}
    figures = {"step_seconds": 0.5, "mfu_full": 0.5, "hfu": 0.5, "ranges": {"mfu_full": span, "hfu": span},
               "untimed_step_share": 0.3, "untimed": "30.0 %: Pallas kernels, loss 30.0 %"}  # fmt: skip
    page = write_run_page(tmp_path / "none", tmp_path, step, figures, run_name="r-plan", kind="predicted")
    text = page.read_text()
    assert "| HFU | 50.00 % | 40.00 % | 60.00 % |" in text
    assert "on kernels without timings of this chip: 30.0 %: Pallas kernels, loss 30.0 %." in text
    assert read_record(tmp_path, "r-plan")["untimed_step_share"] == 0.3
    [row] = [line for line in (tmp_path / "index.md").read_text().splitlines() if "[r-plan]" in line]
    assert row.count("| 30.0 % |") == 1
