"""A cache whose answers appear whole, are not evicted while they are read, and do not outgrow their bound."""

import fcntl
import gzip
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tomat.base.documents import with_checksum
from tomat.base.errors import TomatError
from tomat.perf.plan import plan_cache
from tomat.perf.plan.compile.compiler import EXECUTABLE_FILE, CompiledStep, is_kept
from tomat.perf.plan.plan_cache import (
    PACKAGE,
    PROGRAM_FILE,
    SCHEDULE_FILE,
    evict,
    find_report,
    installed_packages,
    keep,
    keep_report,
    module_files,
    open_result,
    remove_abandoned,
    sources_digest,
    work_folder,
)
from tomat.perf.timed_kernels.programs import SOURCES

SIZE = 100_000


def answer(**values: object) -> str:
    """What a compile writes as its result."""
    return json.dumps(with_checksum(values))


def program(cache: Path, name: str, used: float = 1.0, size: int = SIZE) -> Path:
    folder = cache / "programs" / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(answer(status="fits", name=name))
    (folder / PROGRAM_FILE).write_bytes(bytes(size))
    os.utime(folder / "result.json", (used, used))
    return folder


def finished(cache: Path, key: str) -> Path:
    """What a compile leaves."""
    folder = program(cache, key)
    (folder / SCHEDULE_FILE).write_bytes(gzip.compress(b"{}"))
    return folder


def names(cache: Path) -> set[str]:
    return {path.name for path in (cache / "programs").iterdir()}


def test_the_least_recently_used_goes_first_and_its_request_with_it(tmp_path):
    (tmp_path / "requests").mkdir()
    for number, name in enumerate(("a", "b", "c")):
        program(tmp_path, name, used=number)
        (tmp_path / "requests" / f"{name}.json").write_text(json.dumps({"program": name}))
    opened = open_result(tmp_path / "programs" / "a")
    assert opened is not None and opened[1]["name"] == "a"
    opened[0].close()  # read, and so the most recently used
    evicted = evict(tmp_path, 2 * SIZE + SIZE // 2)
    assert evicted.startswith("removed 1 answer (")
    assert names(tmp_path) == {path.stem for path in (tmp_path / "requests").iterdir()} == {"a", "c"}
    assert evict(tmp_path, 3 * SIZE) == ""
    (tmp_path / "answers").mkdir()
    for number in range(3):  # they count too
        path = tmp_path / "answers" / f"{number}.json"
        path.write_bytes(bytes(SIZE))
        os.utime(path, (time.time() + 9 - number, time.time() + 9 - number))
    evict(tmp_path, SIZE)
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["0.json"] and not names(tmp_path)


def test_what_is_read_is_not_evicted(tmp_path):
    folder = program(tmp_path, "read")
    program(tmp_path, "idle", used=2.0)
    opened = open_result(folder)
    assert opened is not None
    evict(tmp_path, 0)
    assert names(tmp_path) == {"read"} and (folder / PROGRAM_FILE).stat().st_size == SIZE
    opened[0].close()
    evict(tmp_path, 0)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", None), ("result.json", None), ("result.json", ""), ("result.json", '{"stat'), ("result.json", "[]"),
        ("result.json", '{"status": "fits"}'), (PROGRAM_FILE, None), (SCHEDULE_FILE, None),
    ],
)  # fmt: skip
def test_an_answer_that_is_there_stays_but_for_what_a_power_loss_has_taken(tmp_path, name, text):
    """The compile takes no answer that its planner would not: it does it again, and repairs the folder."""
    folder, part = finished(tmp_path, "key"), finished(tmp_path / "work", "part")
    (part / EXECUTABLE_FILE).write_bytes(b"code")
    if name:
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
    assert is_kept(folder, executable=False) == (name == "") and not is_kept(folder, executable=True)
    keep(part, folder)
    assert json.loads((folder / "result.json").read_text())["name"] == ("part" if name == "result.json" else "key")
    assert is_kept(folder, executable=True)
    for key, status in (("oom", "oom"), ("key-memory", "fits")):  # which need no program
        (tmp_path / key).mkdir()
        (tmp_path / key / "result.json").write_text(answer(status=status))
        assert is_kept(tmp_path / key, executable=False)


def test_a_working_folder_lives_as_long_as_its_process(tmp_path, monkeypatch):
    with work_folder(tmp_path) as work:
        (work / "request.json").write_text("{}")
        # what a killed process leaves: the folder and a lock that nobody holds
        (tmp_path / ".work-dead").mkdir()
        (tmp_path / ".work-dead" / "dump").write_bytes(b"x")
        (tmp_path / ".work-dead.lock").touch()
        remove_abandoned(tmp_path)
        assert (work / "request.json").exists() and len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())
    # One into which a child still writes keeps its lock, and goes the next time.
    with monkeypatch.context() as patch, work_folder(tmp_path):
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert len(list(tmp_path.iterdir())) == 2
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "damage"),
    # Two workers name a test alike only if its bytes hold no time of day.
    [(SCHEDULE_FILE, b"x"), (SCHEDULE_FILE, gzip.compress(b"{}", mtime=0)[:-9]), (PROGRAM_FILE, b"x"),
     (SCHEDULE_FILE, gzip.compress(b'{"a": 3}', mtime=0)), (PROGRAM_FILE, gzip.compress(b"x", mtime=0)[:-9])],
)  # fmt: skip
def test_a_damaged_program_says_which_file_it_is_and_which_folder_to_delete(tmp_path, name, damage):
    folder = finished(tmp_path, "key")
    (folder / name).write_bytes(damage)
    with pytest.raises(TomatError, match=r"(damaged|not ).*Delete .*key and plan again\.$") as refused:
        _ = CompiledStep(folder, {"status": "fits"}, cached=True).made
    assert "\n" not in str(refused.value) and str(refused.value).startswith(str(folder / name))


def test_a_damaged_memory_says_which_file_it_is_in_and_which_folder_to_delete(tmp_path):
    step = CompiledStep(tmp_path / "key", {"memory": {"fits": True, "required_bytes": -1}}, cached=True)
    said = rf"memory of the plan {step.folder}/result.json is damaged: required_bytes is -1; .* Delete {step.folder} "
    with pytest.raises(TomatError, match=said):
        _ = step.memory


def test_a_damaged_answer_is_asked_again(tmp_path):
    keep_report(tmp_path, "key", {"fits": True})
    assert find_report(tmp_path, "key") == {"fits": True}
    for text in ("null", '{"fi', "[" * 100_000):
        (tmp_path / "answers" / "key.json").write_text(text)
        assert find_report(tmp_path, "key") is None


def test_one_at_a_time_puts_an_answer_in_or_takes_one_out(tmp_path):
    program(tmp_path, "key")
    part = program(tmp_path / "work", "part")
    for change in (partial(keep, part, tmp_path / "programs" / "other"), partial(evict, tmp_path, 0)):
        with (tmp_path / ".lock").open("a+b") as file, ThreadPoolExecutor(1) as pool:
            fcntl.flock(file, fcntl.LOCK_EX)
            before, changing = names(tmp_path), pool.submit(change)
            with pytest.raises(TimeoutError):
                changing.result(0.1)
            assert names(tmp_path) == before
            fcntl.flock(file, fcntl.LOCK_UN)
        assert names(tmp_path) != before


def test_what_is_locked_for_one_alone_can_be_written(tmp_path, monkeypatch):
    """NFS grants no other exclusive locks."""
    modes, real = [], fcntl.flock

    def watched(file, how):
        if how & fcntl.LOCK_EX:
            modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)
        real(file, how)

    monkeypatch.setattr(plan_cache.fcntl, "flock", watched)
    program(tmp_path, "key")
    (tmp_path / ".work-dead.lock").touch()
    with work_folder(tmp_path):
        remove_abandoned(tmp_path)
    evict(tmp_path, 0)
    assert len(modes) >= 3 and set(modes) == {os.O_RDWR}


@pytest.fixture
def package(tmp_path) -> Path:
    """A package in which `top` imports in every way there is."""
    root = tmp_path / "thing"
    files = {
        "__init__.py": "",
        "top.py": "import thing.plain\ndef f():\n    from thing.room import lazy\n    from thing import other\n",
        "plain.py": "TABLE = Path(__file__).with_name('table.json')\n",
        "other.py": "from thing.room.deep import x\n",
        "table.json": "{}",
        "other.json": "{}",
        "unused.py": "",
        "room/__init__.py": "",
        "room/lazy.py": "import os, numpy\nTABLE = Path(__file__).parent / 'data/deep.json'\n",
        "room/data/deep.json": "{}",
        "room/deep.py": "from thing.plain import TABLE as x\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_kind_of_import_and_named_data_is_followed(package):
    found = {path.relative_to(package).as_posix() for path in module_files("thing.top", package=package)}
    assert found == {
        "__init__.py", "top.py", "other.py", "plain.py", "table.json", "room/__init__.py", "room/lazy.py",
        "room/deep.py", "room/data/deep.json",
    }  # fmt: skip


def test_the_digest_changes_with_what_counts_alone(package):
    assert any(name.startswith("jax-0") for name in installed_packages())
    before = sources_digest("thing.top", package=package)
    (package / "unused.py").write_text("x = 1")
    (package / "other.json").write_text("[]")
    assert sources_digest("thing.top", package=package) == before
    (package / "table.json").write_text("[]")
    changed = sources_digest("thing.top", package=package)
    (package / "room" / "deep.py").write_text("y = 1")
    assert len({before, changed, sources_digest("thing.top", package=package)}) == 3


def test_what_the_step_compiles_is_among_the_sources():
    found = {path.relative_to(PACKAGE).as_posix() for path in module_files("tomat.perf.plan.compile.compiler")}
    assert {"train/guards/loss.py", "train/settings/schema.py"} <= found
    assert {"model/loss/loss_tiles.json", "model/attention_tiles.json"} <= found
    # every module of tomat that a module of them names, by another way of reading: the text of its import lines
    for name in found:
        if name.endswith(".py"):
            text = (PACKAGE / name).read_text(encoding="utf-8")
            for module in re.findall(r"^\s*(?:from|import)\s+(tomat(?:\.\w+)+)", text, re.MULTILINE):
                path = module.removeprefix("tomat.").replace(".", "/")
                assert f"{path}.py" in found or f"{path}/__init__.py" in found, (name, module)


def test_what_fits_timed_kernels_does_not_decide_what_is_compiled_of_them():
    found = {path.stem for path in module_files(*SOURCES)}
    assert {"own", "timings", "llo"} <= found and not {"chip_model", "interconnect", "fit"} & found
