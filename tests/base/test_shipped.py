"""Configurations by name: those of the checkout here, those of the wheel where tomat is installed."""

from pathlib import Path

import pytest

from tomat.app.cli import main
from tomat.base import shipped
from tomat.base.arguments import config_file
from tomat.base.errors import TomatError
from tomat.base.overrides import read_yaml
from tomat.base.shipped import named_configuration, none_of_that_name, shipped_configurations

ROOT = Path(__file__).parents[2]
KINDS = ("train", "sweeps", "tokenize", "numerics", "compare")


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_found_from_any_folder_and_files_come_first(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    every = shipped_configurations(kind)
    assert list(every) == sorted(path.stem for path in (ROOT / "configs" / kind).iterdir())
    for name, path in every.items():
        assert named_configuration(name, kind) == named_configuration(f"{name}.yaml", kind) == path
        assert config_file(kind)(name) == path and read_yaml(name, kind) == read_yaml(path)
    (tmp_path / name).mkdir()  # a folder is no configuration
    assert named_configuration(name, kind) == path
    (tmp_path / f"{name}.yaml").write_text("mine: 1")
    assert read_yaml(f"{name}.yaml", kind) == {"mine": 1}


def test_a_name_that_is_none_is_answered_with_those_that_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    named = {("train", "--config_path"): "200m-v6e16-fast", ("plan", "--sweep"): "mfu-200m"}
    for words, name in named.items():
        assert main([*words, "200m"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "does not exist; these ship" in said and name in said
    with pytest.raises(TomatError, match="found by name: demo"):
        read_yaml("none", "numerics")
    assert main(["train", "--config_path", "x" * 5000]) == 2


def test_an_installed_tomat_has_them_in_its_package(tmp_path, monkeypatch):
    (tmp_path / "configs" / "train").mkdir(parents=True)
    (tmp_path / "configs" / "train" / "own.yaml").write_text("")
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path)
    assert list(shipped_configurations("train")) == ["own"]
    assert none_of_that_name("x", "sweeps") == "config file x does not exist; none ships with this tomat"


def test_the_wheel_holds_every_configuration_and_what_pages_are_made_of(monkeypatch):
    from hatchling.builders.wheel import WheelBuilder

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    builder = WheelBuilder(str(ROOT))
    with builder.config.set_build_data({"artifacts": [], "force_include": {}, "build_hooks": []}):
        held = {file.distribution_path for file in builder.recurse_included_files()}
    wanted = {f"tomat/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "tomat" / "report" / "html" / "assets").iterdir()}
    others = "perf/plan/calibration.json", "perf/cost/kernels.json", "data/density/demo_data/index.json", "__init__.pyi"
    assert len(wanted) > 20 and wanted | {f"tomat/{name}" for name in (*others, "py.typed")} <= held
    assert not [name for name in held if name.startswith(("docs/", "tests/", "configs/"))]
