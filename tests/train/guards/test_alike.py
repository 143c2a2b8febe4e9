"""What hosts compare before they begin. Two real ones: tests/train/test_multihost.py."""

import json

import pytest

from tomat.base import shipped
from tomat.base.documents import flatten
from tomat.train.guards import alike
from tomat.train.guards.alike import PACKAGES, differences, shortened, started_with
from tomat.train.settings.config import load_config
from tomat.train.settings.meanings import said_of


def prints(*words: str) -> dict[str, str]:
    return {key: shortened(value) for key, value in started_with(load_config("demo", list(words)), {}).items()}


@pytest.fixture(scope="module")
def mine() -> dict[str, str]:
    return prints()


def test_every_key_of_the_configuration_is_compared_but_those_with_a_reason(mine):
    keys = set(flatten(load_config("demo").to_dict()))
    assert keys - set(mine) == {key for key in keys if said_of(key).host} and len(keys & set(mine)) > 120
    assert {f"package {one}" for one in PACKAGES} <= set(mine)
    assert {"code.commit", "code.files", "jax.config.jax_enable_x64"} <= set(mine)


def test_a_configuration_that_differs_is_named(mine):
    words = ["--optimizer.learning_rate", "0.1", "--optimizer.weight_decay_modules", "[norm]"]
    found = differences(["a", "b"], [mine, prints(*words, "--trainer.mesh.axes", "{data: 1, model: -1, replica: 1}")])
    named = {one.partition(" is ")[0] for one in found if "host 0 (a)" in one and "host 1 (b)" in one}
    assert named >= {"optimizer.learning_rate", "optimizer.weight_decay_modules", "trainer.mesh.axes.data"}


def test_what_says_which_host_it_is_may_differ(mine):
    own = "{coordinator_address: null, num_processes: null, process_id: 3, local_device_ids: [1]}"
    words = ["--trainer.distributed", own, "--trainer.jax_compilation_cache_dir", "/scratch/3"]
    assert differences(["a", "b"], [mine, prints(*words)]) == []
    sets = [prints("--data.source", "shards", "--data.train", f"/disk/{host}/set") for host in "ab"]
    assert sets[0] == sets[1]


@pytest.mark.parametrize("variable", alike.FLAG_VARIABLES)
def test_flags_are_compared_one_by_one(mine, monkeypatch, variable):
    monkeypatch.setenv(variable, "--xla_new=3 --xla_switch --xla_dump_to=/scratch/3")
    theirs = prints()
    assert theirs[f"{variable} --xla_new"] == '"3"' and f"{variable} --xla_switch" in theirs
    assert f"{variable} --xla_dump_to" not in theirs
    found = differences(["a", "b"], [mine, theirs])
    assert f'{variable} --xla_new is not set on host 0 (a) and "3" on host 1 (b)' in found


def test_code_is_known_by_its_files(mine, monkeypatch, tmp_path):
    """Also where there is no checkout, and where two have changes on the same commit."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "one.py").write_text("x = 1\n")
    source_hash, found = shipped.source_hash, json.loads(mine["code.files"])
    with monkeypatch.context() as patch:
        patch.setattr(shipped, "PACKAGE", tmp_path)
        hashes = [found, source_hash()]
        assert source_hash() == hashes[-1]
        (tmp_path / "base" / "one.py").rename(tmp_path / "one.py")
        hashes.append(source_hash())
        (tmp_path / "one.py").write_text("x = 2\n")
        hashes.append(source_hash())
    assert len(set(hashes)) == 4
    monkeypatch.setattr(alike, "source_hash", lambda: hashes[-1])
    assert [one.split()[0] for one in differences(["a", "b"], [mine, prints()])] == ["code.files"]
    # The first host writes pages into its checkout, which is `-dirty` from then on.
    monkeypatch.setattr(alike, "code_details", lambda: {"commit": "abc1234-dirty"})
    assert [prints()[f"code.{key}"] for key in ("commit", "pack")] == ['"abc1234"', '"none"']
    monkeypatch.setattr(alike, "code_details", lambda: {"commit": "abc1234", "pack": "f" * 64})
    assert "fff" in prints()["code.pack"]


def test_the_odd_one_of_many_is_named():
    said = [{"key": "1"}] * 63
    hosts = [f"t{number}" for number in range(64)]
    assert differences(hosts, [*said[:40], {"key": "2"}, *said[40:]]) == [
        "key is 2 on host 40 (t40) and 1 on 63 others"
    ]
    assert differences(hosts[:2], [{"key": "1"}, {}]) == ["key is 1 on host 0 (t0) and not set on host 1 (t1)"]
    assert differences(hosts, [*said, said[0]]) == []
    one, other = (shortened(["layer"] * 100 + [end]) for end in ("a", "b"))
    assert one != other and len(one) < 80
