"""A run as a folder of weights: the same predictions, few bits, and nothing damaged is taken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from json_keys import assert_keys_of_before
from pymatgen.core import Structure
from reported import reported
from safetensors.numpy import load_file

from tomat.app.cli import main
from tomat.base.documents import with_checksum
from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.predict.inference.predictor import load
from tomat.predict.inference.trained import load_trained
from tomat.predict.weights.arrays import named_arrays
from tomat.predict.weights.folder import ARRAYS_FILE, Compression, read_weights, write_weights
from tomat.predict.weights.hub import front_matter
from tomat.predict.weights.record import WEIGHTS_FILE

CRYSTAL = Crystal(np.eye(3) * 3.3, np.array([11, 9]), np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]), "NaF")


@pytest.fixture(scope="module")
def exported(run_dir, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("weights") / "whole"
    words = ["--run", str(run_dir), "--output", str(output), "--licence", "CC-BY-4.0"]
    assert main(["export", *words]) == 0
    return output


def test_the_folder_is_the_run(run_dir, exported, tmp_path):
    densities = [load(str(folder)).predict(CRYSTAL, (14, 14, 14)).rho for folder in (run_dir, exported)]
    assert np.array_equal(*densities)
    run, again = load_trained(run_dir), load_trained(exported)
    before, after = named_arrays(run.model), named_arrays(again.model)
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    assert {"model.layers.0.mlp.up_proj.weight", "environment.network.layers.0.weight"} < before.keys()
    assert again.step == run.step and again.weights == run.weights and again.codec.sha256 == run.codec.sha256
    assert sorted(path.name for path in exported.iterdir()) == sorted(
        [ARRAYS_FILE, WEIGHTS_FILE, "README.md", "codec.json", "config.yaml", "promolecule.json"]
    )
    card = (exported / "README.md").read_text()
    assert "1.000 of float32" in card and "CC-BY-4.0" in card and "measures it" in card
    with pytest.raises(TomatError, match="step 2 alone"):
        load_trained(exported, 0)
    assert main(["export", "--run", str(exported), "--output", str(tmp_path / "x")]) == 2


@pytest.mark.parametrize(
    "words, largest", [(["--bits", "8"], 0.35), (["--bits", "2", "--what", "mlp=3,embedding"], 0.55)]
)
def test_few_bits_predict(run_dir, tmp_path, words, largest):
    output = tmp_path / "small"
    sizes = reported(tmp_path, "compress", "--run", run_dir, "--output", output, *words)
    assert_keys_of_before("compress", sizes)
    assert sizes["weights_bytes"] == sum(array.nbytes for array in load_file(output / ARRAYS_FILE).values())
    assert sizes["weights_over_float32"] < largest
    whole, few = named_arrays(load_trained(run_dir).model), read_weights(output)
    assert words[1] in few.weights
    for name, array in whole.items():
        error = np.linalg.norm(array - few.arrays[name])
        assert error <= 0.5 * np.linalg.norm(array) and (error > 0) == (name in sizes["relative_error"])
    assert load(str(output)).predict(CRYSTAL, (14, 14, 14)).rho.shape == (14, 14, 14)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (ARRAYS_FILE, lambda content: content[:1000], "not the file that was written"),
        ("codec.json", lambda content: content + b" ", "codec.json is not the file"),
        ("promolecule.json", None, "promolecule.json is missing"),
        (WEIGHTS_FILE, lambda content: content.replace(b'"format_version": 1', b'"format_version": 2'), "version 2"),
        (WEIGHTS_FILE, lambda content: b"[]", f"{WEIGHTS_FILE} is not a record of weights: .* a list. Write the"),
        (WEIGHTS_FILE, lambda content: b"{}", f"{WEIGHTS_FILE} has format_version None; .* reads 1. Write the folder"),
    ],
)
def test_damage_is_said(exported, tmp_path, name, change, message):
    shutil.copytree(exported, tmp_path / "damaged")
    path = tmp_path / "damaged" / name
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(TomatError, match=message):
        load_trained(tmp_path / "damaged")


def test_arrays_of_another_model_are_named(run_dir, tmp_path):
    arrays = named_arrays(load_trained(run_dir).model)
    name = "model.layers.0.mlp.up_proj.weight"
    write_weights(run_dir, {**arrays, name: arrays[name][:, :-1]}, 1, "of the last step", tmp_path / "other")
    with pytest.raises(TomatError, match=rf"{name} is \[64, 31\]; .* has \[64, 32\]"):
        load_trained(tmp_path / "other")


LOADED = """
import json
import sys
import tomat
from tomat.app.cli import main
from tomat.base.errors import TomatError
found = []
for name in ("org/good", "org/good@v1", "org/bare", "org/part", "org/absent", "good"):
    try:
        found.append(tomat.load(f"hf://{name}").made_by["model"])
    except TomatError as error:
        found.append(str(error))
words = ["--structure", sys.argv[1], "--grid", "9", "8", "7", "--output", sys.argv[2]]
found += [main(["predict", "--run", f"hf://org/{name}", *words]) for name in ("good", "absent")]
print(json.dumps(found))
"""


def test_a_folder_of_the_hub_is_loaded_by_its_address(run_dir, exported, tmp_path):
    """From the hub's cache on this machine, in a process without a network, which is all that a test has."""
    folder = tmp_path / "made"
    words = ["--run", str(run_dir), "--output", str(folder), "--format", "huggingface", "--licence", "CC-BY-4.0"]
    assert main(["export", *words]) == 0
    assert {path.name for path in folder.iterdir()} == {path.name for path in exported.iterdir()}
    _, matter, card = (folder / "README.md").read_text().split("---\n", 2)
    matter = yaml.safe_load(matter)
    assert matter["library_name"] == "tomat" and matter["license"] == "cc-by-4.0"
    assert yaml.safe_load(front_matter("Our own: 2").strip("-\n"))["license_name"] == "Our own: 2"
    assert 'tomat.load("hf://ORG/NAME")' in card
    for name, revision in (("good", "main"), ("good", "v1"), ("bare", "main"), ("part", "main")):
        repository = tmp_path / "hub" / f"models--org--{name}"
        snapshot = repository / "snapshots" / ("0" * 39 + "1")
        shutil.copytree(folder, snapshot, dirs_exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(snapshot.name)
        if name == "bare":
            (snapshot / WEIGHTS_FILE).unlink()
    record = json.loads((snapshot / WEIGHTS_FILE).read_text())
    del record["sha256"]["codec.json"], record["content_sha256"]
    (snapshot / WEIGHTS_FILE).write_text(json.dumps(with_checksum(record)))
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    Structure(CRYSTAL.lattice, ["Na", "F"], CRYSTAL.frac_coords).to(filename=str(tmp_path / "POSCAR"))
    words = [sys.executable, "-c", LOADED, str(tmp_path / "POSCAR"), str(tmp_path / "out")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    good, revision, bare, part, absent, unnamed, *statuses = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0, 2] and list((tmp_path / "out").rglob("*CHGCAR")), done.stderr
    assert good == revision == load(str(exported)).made_by["model"]
    assert f"hf://org/bare has no {WEIGHTS_FILE}; expected a folder that `tomat export --format huggingface`" in bare
    assert f"hf://org/part has a codec.json without a hash in {WEIGHTS_FILE}" in part
    assert "hf://org/absent cannot be fetched" in absent and "hf auth login" in absent
    assert "expected hf://ORG/NAME" in unnamed


def test_what_cannot_be_leaves_nothing(run_dir, tmp_path, capsys):
    out = ["--run", str(run_dir), "--output", str(tmp_path / "out")]
    assert main(["compress", *out, "--bits", "5"]) == 2
    assert "5 bits are not offered with scheme lut" in capsys.readouterr().err
    assert main(["compress", *out, "--bits", "4", "--what", "mlp,heads"]) == 2
    assert "expected one of mlp, attention, embedding, environment" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main(["export", "--run", str(run_dir), "--output", str(tmp_path / "there")]) == 2

    def stopped(name: str) -> None:
        raise KeyboardInterrupt

    arrays = {"a": np.ones((64, 64), np.float32)}
    with pytest.raises(KeyboardInterrupt):
        write_weights(
            run_dir, arrays, 0, "", tmp_path / "out", compression=Compression("lut", 128, {"mlp": 4}), on_array=stopped
        )
    broken = {"a": np.where(np.arange(64) == 3, np.nan, arrays["a"])}
    with pytest.raises(TomatError, match="a has 64 values of 4,096 that are not finite numbers"):
        write_weights(run_dir, broken, 0, "", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
