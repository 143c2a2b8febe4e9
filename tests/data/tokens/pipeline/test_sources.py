import gzip
import json

import pytest

from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import demo_materials
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.sources import find_materials


def names(config):
    return [each.material_id for each in find_materials(config)]


def test_filelist_and_split_give_the_order(tmp_path, tree, retokenize_config):
    assert names(retokenize_config(tmp_path)) == ["mp-4", "mp-0", "mp-1", "mp-2", "mp-5"]
    assert names(retokenize_config(tmp_path, split_file=None)) == [f"mp-{k}" for k in range(6)]
    assert names(retokenize_config(tmp_path, split_file=None, filelist=None)) == [f"mp-{k}" for k in range(6)]
    # Without the folder `label` the groups lie in the input itself.
    assert names(retokenize_config(tmp_path, input=str(tree / "label"), split_file=None, filelist=None))[0] == "mp-0"


@pytest.mark.parametrize(
    ("filelist", "split", "message"),
    [
        ("mp-0\nmp-1\nmp-0\n", '{"train": [0, 1, 2]}', "mp-0 is named twice"),
        ("mp-0\n..\n", '{"train": [1]}', r"called '\.\.'; expected a name"),
        ("mp-0\n\tmp\x07\n", '{"train": [1]}', "expected a name of printable characters"),
        ("mp-0\n", '{"train": []}', "split 'train' is empty"),
        ("mp-0\n", '{"train": [1]}', "names the index 1 .* has 0 to 0"),
        ("mp-0\n", '{"train": [-1]}', "names the index -1"),
        ("mp-0\n", '{"test": [0]}', "no list of indices for the split 'train'"),
        ("mp-0\n", "not JSON", "no list of indices"),
    ],
)
def test_bad_lists_are_one_error_each(tmp_path, tree, retokenize_config, filelist, split, message):
    (tree / "mp_filelist.txt").write_text(filelist)
    (tree / "split_limit_22M.json").write_text(split)
    with pytest.raises(TomatError, match=message):
        find_materials(retokenize_config(tmp_path))


def test_chgcars_at_any_depth(tmp_path):
    for name in ("a/CHGCAR.gz", "deep/b/CHGCAR", "mp-7.vasp"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("")
    assert sorted(names(RetokenizeConfig(str(tmp_path / "in"), "out", "chgcar"))) == ["a", "b", "mp-7"]
    (tmp_path / "in" / "other" / "a").mkdir(parents=True)
    (tmp_path / "in" / "other" / "a" / "CHGCAR").write_text("")
    found = names(RetokenizeConfig(str(tmp_path / "in"), "out", "chgcar"))
    assert sorted(found) == ["a", "b", "mp-7", "other-a"]
    (tmp_path / "in" / "deep" / "b" / "x.cube").write_text("")
    assert sorted(names(RetokenizeConfig(str(tmp_path / "in"), "out", "folder"))) == [*sorted(found), "x"]


def test_materials_project_objects(tmp_path):
    for name in ("mp-2", "mp-1"):
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps({}).encode()))
    found = find_materials(RetokenizeConfig(str(tmp_path), "out", "materials_project"))
    assert [each.location for each in found] == [str(tmp_path / "mp-1.json.gz"), str(tmp_path / "mp-2.json.gz")]
    with pytest.raises(TomatError, match="holds no density of the kind 'rho_gga'"):
        find_materials(RetokenizeConfig(str(tmp_path), "out"))


def test_embedded_densities_state_their_electrons():
    found = find_materials(RetokenizeConfig(output="out", source="embedded", split="validation", codec="codec.json"))
    assert [(each.material_id, each.n_electrons) for each in found] == [
        (each.material_id, each.n_electrons) for each in demo_materials("validation")
    ]
