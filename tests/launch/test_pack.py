"""The archive of a launch: the same bytes for the same files, and what it says of itself where there is no `.git`."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tomat.base import shipped
from tomat.base.errors import TomatError
from tomat.launch import pack as pack_module
from tomat.launch.pack import Pack, build_pack, read_tree
from tomat.launch.remote import install_script


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True)


def packed(*overrides: str, name: str = "pack.tar.gz", leave_out=()) -> Pack:
    config = Path("run.yaml")
    return build_pack(read_tree(Path.cwd(), config, leave_out), config, overrides, Path("runs") / name)


def names(pack: Pack) -> list[str]:
    with tarfile.open(pack.path) as archive:
        return archive.getnames()


def test_the_same_files_configuration_and_words_make_the_same_bytes(world):
    first = packed("--a", "b")
    os.utime("run.yaml", (1, 1))
    os.chmod("train_tomat_tpu.py", 0o600)
    again = packed("--a", "b", name="again.tar.gz")
    assert first.sha256 == again.sha256 and first.path.read_bytes() == again.path.read_bytes()
    others = [packed("--a", "c").sha256]
    (world.checkout / "run.yaml").write_text("run_name: b")
    others.append(packed("--a", "b").sha256)
    os.chmod("train_tomat_tpu.py", 0o755)
    others.append(packed("--a", "b").sha256)
    assert len({first.sha256, *others}) == 4


def test_it_has_what_git_tracks_or_does_not_ignore_and_neither_secrets_nor_reports(world):
    for name in ("new.py", "train.env", "ignored.bin", "gone.py", "report.json"):
        (world.checkout / name).write_text("x")
    (world.checkout / ".gitignore").write_text("*.bin\n")
    os.symlink("new.py", "link.py")
    git("add", ".gitignore", "gone.py")
    git("commit", "-q", "-m", "b")
    (world.checkout / "gone.py").unlink()
    pack = packed(leave_out=[Path("train.env"), world.checkout / "report.json"])
    wanted = [".gitignore", "link.py", "new.py", "run.yaml", "tomat-launch/run.yaml", "tomat-pack.json"]
    assert names(pack) == [*wanted, "train_tomat_tpu.py"]
    assert pack.dirty and "with changes" in pack.words
    for place in (os.path.abspath("new.py"), "../elsewhere"):
        os.unlink("link.py")
        os.symlink(place, "link.py")
        with pytest.raises(TomatError, match="link.py is a link to .*, outside this checkout"):
            packed()


@pytest.mark.parametrize("commit", ["clean", "changed", "untracked", "none", "configuration"])
def test_what_is_no_commit_as_it_is_is_said(world, commit):
    """A configuration is packed and recorded whole, so that a changed one is no other code."""
    if commit == "none":
        subprocess.run(["rm", "-rf", ".git"], check=True)
        git("init", "-q")
    changed = {"changed": "train_tomat_tpu.py", "untracked": "new.py", "configuration": "run.yaml"}.get(commit)
    if changed is not None:
        (world.checkout / changed).write_text("x")
    tree = read_tree(world.checkout, Path("run.yaml"))
    if commit in ("clean", "configuration"):
        assert tree.problem is None and not packed().dirty
    else:
        assert "--allow_dirty" in (tree.problem or "") and packed().dirty
        assert commit == "none" or f"({changed})" in (tree.problem or "")


def test_data_in_a_checkout_are_refused(world, monkeypatch):
    monkeypatch.setattr(pack_module, "MAX_MEGABYTES", 0.01)
    (world.checkout / "densities.npz").write_bytes(b"x" * 20_000)
    with pytest.raises(TomatError, match="0 MB .the largest is densities.npz.*gitignore"):
        packed()
    assert not list((world.checkout / "runs").glob("*"))


def test_a_host_knows_commit_and_pack_without_git_and_refuses_another_archive(world, monkeypatch):
    (world.checkout / "new.py").write_text("x")
    pack = packed()
    bucket = world.folder / "buckets" / "b"
    bucket.mkdir(parents=True)
    host = world.folder / "host"
    (host / "tomat-launch").mkdir(parents=True)
    for content, installs in ((pack.path.read_bytes(), True), (b"another", False)):
        (bucket / "pack").write_bytes(content)
        done = subprocess.run(["bash", "-c", install_script("gs://b/pack", pack.sha256)], cwd=host)
        assert (done.returncode == 0) is installs
    checkout = host / "tomat-launch" / "checkout"
    monkeypatch.setattr(shipped, "PACKAGE", checkout / "tomat")
    assert json.loads((checkout / shipped.PACK_FILE).read_text())["config_path"] == "tomat-launch/run.yaml"
    assert shipped.code_details() == {"commit": f"{pack.commit}-dirty", "pack": pack.sha256}
    monkeypatch.setattr(shipped, "PACKAGE", world.folder / "none" / "tomat")
    assert shipped.code_details() == {"commit": shipped.commit()}
