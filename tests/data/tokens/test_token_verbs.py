import json

import pytest
from chgcar_files import write_chgcar
from reported import reported, run
from retokenized import rewrite

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.data.density.demo.embedded import demo_materials
from tomat.data.density.zarr_store import read_zarr
from tomat.data.tokens.pipeline import stages
from tomat.data.tokens.shards import open_shards


@pytest.fixture
def densities(kept_tree):
    return [kept_tree / "label" / f"mp-{k}.zarr" for k in range(2)]


@pytest.fixture
def shards(tmp_path, densities, codec):
    write_codec(codec, tmp_path / "codec.json")
    arguments = ["--input", *densities, "--layout", "v3-p7", "--codec", tmp_path / "codec.json"]
    arguments += ["--patches_per_material", 40, "--seed", 3, "--split", "train", "--json", tmp_path / "figures.json"]
    assert run("tokenize", *arguments, "--output", tmp_path / "set") == 0
    return tmp_path / "set"


def test_tokenize_info_and_verify(tmp_path, shards, capsys):
    opened = open_shards(shards)
    assert [m.material_id for m in opened.manifest.materials] == ["mp-0", "mp-1"]
    assert (opened.rows, opened.manifest.split, opened.manifest.seed) == (80, "train", 3)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["rows"], figures["materials"], figures["context_tokens"], figures["chunks"]) == (80, 2, 512, 2)
    assert reported(tmp_path, "shards", "info", shards)["tokens"] == 80 * 512
    assert reported(tmp_path, "shards", "verify", shards)["chunks"] == 2
    assert "all 2 chunks (80 rows) are whole" in capsys.readouterr().out
    (shards / "tokens.zarr" / "c" / "1" / "0").unlink()
    with pytest.raises(TomatError, match="Chunk 1 of"):
        run("shards", "verify", shards)


def test_show_a_row(shards, capsys):
    run("tokens", "show", shards, "--row", 41, "--raw", "--voxels", 2)
    printed = capsys.readouterr().out.splitlines()
    x, y, z = open_shards(shards).anchor_of_row(41)
    assert printed[0] == f"row      41 of 80: mp-1, first voxel {x} {y} {z}"
    assert any(line.startswith("grid     9 x 10 x 9") for line in printed)
    assert any(line.endswith("ATOMS  Z14  Z14  /ATOMS") for line in printed)
    with pytest.raises(TomatError, match="has 80 rows"):
        run("tokens", "show", shards, "--row", 80)


def test_show_a_density(tmp_path, shards, densities, capsys):
    """The row of the set, cut from the density itself, reads the same."""
    x, y, z = open_shards(shards).anchor_of_row(5)
    run("tokens", "show", shards, "--row", 5)
    row = capsys.readouterr().out.splitlines()[1:]
    codec = tmp_path / "codec.json"
    arguments = ["--input", densities[0], "--anchor", x, y, z, "--layout", "v3-p7", "--codec", codec]
    run("tokens", "show", *arguments)
    assert capsys.readouterr().out.splitlines() == row


def test_defaults_in_the_help_are_those_of_the_settings():
    from tomat.app.token_verbs import SETTINGS
    from tomat.data.tokens.pipeline.config import RetokenizeConfig

    config = RetokenizeConfig(input="in", output="out")
    for name in ("source", "split", "layout", "max_clipped_share", "max_skipped", "seed"):
        assert f"(default: {getattr(config, name)})" in SETTINGS[name]


def test_verify_finds_the_embedded_densities(tmp_path, codec, capsys):
    """Sets of `--demo` and of trainings on the embedded densities do not say where their densities lie."""
    write_codec(codec, tmp_path / "codec.json")
    arguments = ["--demo", "validation", "--layout", "v3-p7", "--codec", tmp_path / "codec.json", "--split", "mine"]
    run("tokenize", *arguments, "--patches_per_material", 2, "--output", tmp_path / "set")
    manifest = open_shards(tmp_path / "set").manifest
    names = {each.material_id for each in manifest.materials}
    assert names == {each.material_id for each in demo_materials("validation")} and manifest.split == "mine"
    capsys.readouterr()
    run("shards", "verify", tmp_path / "set")
    printed = " ".join(capsys.readouterr().out.split())
    assert "compared with the embedded densities" in printed and "agree with the source" in printed
    chunk = tmp_path / "set" / "tokens.zarr" / "c" / "0" / "0"
    whole = chunk.read_bytes()
    chunk.unlink()
    run("shards", "verify", tmp_path / "set", "--repair")
    assert chunk.read_bytes() == whole


def test_verify_of_other_sets_asks_where_the_densities_lie(shards, capsys):
    run("shards", "verify", shards)
    printed = " ".join(capsys.readouterr().out.split())
    assert "not compared with its densities" in printed and "say it with --input or --source embedded" in printed
    with pytest.raises(TomatError, match="the embedded set has no material mp-0; is it what the set was made from"):
        run("shards", "verify", shards, "--source", "embedded")
    with pytest.raises(TomatError, match="which does not say where its densities lie. Leave them out"):
        run("shards", "verify", shards, "--accept", "zeros")


@pytest.mark.parametrize("flags", [["--species", "Na"], ["--accept", "zeros"]])
def test_flags_that_could_do_nothing_are_refused(tmp_path, shards, flags):
    codec = ["--layout", "v3-p7", "--codec", tmp_path / "codec.json", "--output", tmp_path / "out"]
    with pytest.raises(TomatError, match="for --input; they do not apply to the embedded densities. Leave them out"):
        run("tokenize", "--demo", "train", *codec, *flags)
    with pytest.raises(TomatError, match="are for --input; they do not apply to a shard set"):
        run("tokens", "show", shards, *flags)
    assert main(["codec", "fit", "--demo", "--output", str(tmp_path / "out"), *flags]) == 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def unnamed(tmp_path, densities):
    """A VASP 4 CHGCAR of silicon, which names no element."""
    folder = tmp_path / "in" / "mp-1"
    folder.mkdir(parents=True)
    write_chgcar(read_zarr(densities[0]), folder / "CHGCAR")
    lines = (folder / "CHGCAR").read_text().splitlines()
    assert lines.pop(5).split() == ["Si"]
    (folder / "CHGCAR").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("verb", ["tokenize", "codec fit", "retokenize"])
def test_elements_that_a_file_does_not_name(tmp_path, unnamed, codec, verb, caplog):
    write_codec(codec, tmp_path / "codec.json")
    words = {
        "tokenize": ["tokenize", "--input", unnamed, "--codec", tmp_path / "codec.json", "--layout", "v3-p7"],
        "codec fit": ["codec", "fit", "--input", unnamed, "--bins", 50],
        "retokenize": ["retokenize", "--source", "chgcar", "--input", unnamed.parent, "--layout", "v3-p7"],
    }[verb]
    if verb == "retokenize":
        words += ["--codec", tmp_path / "codec.json", "--max_skipped", 0, "--workers", 1]
    words = [str(word) for word in words]
    assert main([*words, "--output", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists() or verb == "retokenize"
    assert main([*words, "--species", "Si", "--output", str(tmp_path / "by_flag")]) == 0
    header = (unnamed / "CHGCAR").read_text().splitlines()[:9]
    (unnamed / "POSCAR").write_text("\n".join([*header[:5], "Si", *header[5:], "", ""]))
    caplog.clear()
    assert main([*words, "--output", str(tmp_path / "by_poscar")]) == 0
    if verb != "codec fit":
        rows = [open_shards(tmp_path / name).read_rows(0, 1)[0] for name in ("by_flag", "by_poscar")]
        for row in rows:  # ATOMS Si Si
            place = row.tolist().index(20 + 14 - 1)
            assert row[place : place + 2].tolist() == [33, 33]
    if verb == "retokenize":  # the set remembers how its densities were read
        assert main(["shards", "verify", str(tmp_path / "by_flag")]) == 0
    if verb != "retokenize":  # its workers are processes of their own
        assert "taken from the POSCAR beside it: Si" in caplog.text


def test_a_set_goes_on_with_the_elements_it_was_begun_with(tmp_path, unnamed, codec, monkeypatch):
    write_codec(codec, tmp_path / "codec.json")
    words = ["tokenize", "--input", unnamed, "--codec", tmp_path / "codec.json", "--layout", "v3-p7"]
    words += ["--output", tmp_path / "set", "--patches_per_material", 200]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "chunk_tokens", stop)
        with pytest.raises(KeyboardInterrupt):
            run(*words, "--species", "Si")
    with pytest.raises(TomatError, match="holds another data set: it differs in species. Remove it"):
        run(*words, "--species", "C")
    with pytest.raises(TomatError, match="holds another data set: it differs in accept. Remove it"):
        run(*words, "--species", "Si", "--accept", "zeros")
    # A set that was begun before they were recorded goes on.
    manifest = tmp_path / "set" / "manifest.json"
    assert json.loads(manifest.read_text())["read_rules"] == {"species": ["Si"], "accept": []}
    rewrite(manifest, "read_rules")
    run(*words, "--species", "Si")
    assert open_shards(tmp_path / "set").rows == 200
