import argparse
import json
from pathlib import Path

import pytest

from tomat.app.profile_verbs import register
from tomat.base.errors import TomatError

HLO = Path(__file__).parents[2] / "fixtures" / "profiles" / "v6e_step.hlo.pb.gz"


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    args = parser.parse_args(["profile", *map(str, words)])
    return args.run(args)


def test_a_run_folder_gets_its_page(tpu_profile, tmp_path, capsys):
    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "profiler").symlink_to(tpu_profile, target_is_directory=True)
    out = tmp_path / "r1.json"
    assert run(folder, "--json", out, "--docs", tmp_path / "docs") == 0
    data = json.loads(out.read_text())
    assert data["n_devices"] == 4
    assert {"step_seconds", "flops_per_step_per_device", "memory_bytes"} <= set(data)
    assert (tmp_path / "docs" / "r1.md").exists()
    assert "attention backward" in capsys.readouterr().out


def test_compare_and_its_exit_code(tpu_profile, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    run(tpu_profile, "--json", a)
    data = json.loads(a.read_text())
    assert run("compare", a, tpu_profile) == 0
    for op in data["ops"]:
        if op["category"] == "matmul":
            op["seconds"] *= 2
    data["step_seconds"] = sum(op["seconds"] for op in data["ops"])
    b.write_text(json.dumps(data))
    report = tmp_path / "c.json"
    assert run("compare", a, b, "--json", report) == 1
    assert json.loads(report.read_text())["rows"][0]["category"] == "matmul"
    assert run("compare", b, a) == 0  # faster is no regression
    assert run("compare", a, b, "--warn_percent", 50, "--fail_percent", 90) == 0
    assert "matmul" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [((), "give --device_kind, such as 'TPU v6 lite'"), (("--device_kind", "TPU v99"), "no peak .* 'TPU v99'")],
)
def test_an_hlo_module_needs_a_known_chip(flags, message, tmp_path):
    """Without one every row would take no time."""
    for words in ((HLO,), ("compare", HLO, HLO)):
        with pytest.raises(TomatError, match=message) as refused:
            run(*words, *flags, "--json", tmp_path / "x.json")
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("flag", ["--session", "--program"])
def test_what_only_a_trace_has_is_refused_of_other_files(flag, tpu_profile, tmp_path):
    trace = next(tpu_profile.rglob("*.xplane.pb"))
    run(trace, "--json", tmp_path / "a.json")
    others = (HLO, tmp_path / "a.json") if flag == "--program" else (HLO, tmp_path / "a.json", trace)
    for target in others:
        with pytest.raises(TomatError, match=f"leave {'--session out' if target == trace else 'it out'}"):
            run(target, flag, "nope", "--device_kind", "TPU v6 lite")


def test_index(tmp_path, capsys):
    assert run("index", tmp_path) == 0
    assert "No run is on record yet." in (tmp_path / "index.md").read_text()
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["a b", "a --xprof", "compare a", "compare a b --warn_percent 9", "index", "index /nowhere", "/nowhere"]
)
def test_wrong_words(words):
    with pytest.raises(TomatError):
        run(*words.split())
