import argparse
import json

import pytest

from tomat.app.density_verbs import register
from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import demo_materials


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    return args.run(args)


def test_show_lists_every_cell_or_one_in_full(tmp_path, capsys):
    assert run("demo-data", "show", "--json", str(tmp_path / "index.json")) == 0
    assert capsys.readouterr().out.count("validation") == len(demo_materials("validation"))
    index = json.loads((tmp_path / "index.json").read_text())
    assert len(index["cells"]) == len(demo_materials())
    material = demo_materials()[0]
    assert run("demo-data", "show", material.material_id, "--json", str(tmp_path / "cell.json")) == 0
    cell = json.loads((tmp_path / "cell.json").read_text())
    assert cell["electron_count"] == pytest.approx(material.n_electrons, rel=1e-6)
    assert json.loads(capsys.readouterr().out)["material_id"] == material.material_id
    with pytest.raises(TomatError, match="no embedded density 'nothing'"):
        run("demo-data", "show", "nothing")
