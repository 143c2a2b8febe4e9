"""What cannot be written is one line and status 2, in every verb: a full disk, a file in a folder's place."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from small_commands import VERBS, small_commands, why_not
from tiny_run import tomat

from tomat.app.cli import main

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full: no file that is always full")


def flags(verb: str) -> set[str]:
    return {flag for action in VERBS[verb]._actions for flag in action.option_strings}


def one_line(told: str) -> bool:
    lines = told.splitlines()
    return len([line for line in lines if line.startswith("error: ")]) == 1 and "Traceback" not in told


def test_a_report_that_the_disk_does_not_take_is_one_line(tmp_path, capfd):
    commands = small_commands(tmp_path / "files", "a")
    reports = [verb for verb in VERBS if "--json" in flags(verb) and not why_not(verb)]
    assert len(reports) > 12 and set(reports) <= set(commands)
    picture = tmp_path / "full.png"
    picture.symlink_to(FULL)
    page = tmp_path / "full.md"
    page.symlink_to(FULL)
    wrong = {}
    for verb, words in commands.items():
        tried = [["--json", str(FULL)]] if "--json" in flags(verb) else []
        tried += [["--picture", str(picture)]] if "--picture" in flags(verb) else []
        tried += [["--output", str(page)]] if verb in ("runs log", "runs compare", "page", "codec fit") else []
        for more in tried:
            capfd.readouterr()
            without = [word for at, word in enumerate(words) if more[0] not in (word, words[at - 1])]
            status = main([*without, *more])
            told = capfd.readouterr().err
            if status != 2 or not one_line(told) or more[1] not in told or "No space left" not in told:
                wrong[f"{verb} {more[0]}"] = (status, told)
    assert not wrong
    assert FULL.is_char_device() and picture.is_symlink()


@pytest.mark.parametrize("where", ["a file in the place of its folder", "a folder in its place"])
def test_what_is_in_the_way_is_one_line(tmp_path, capfd, where):
    """Found at the command line where that is possible, and where not, when it is written."""
    from tomat.base.errors import TomatError
    from tomat.base.reporting import write_json

    target = tmp_path / "place" / "x.json"
    if where.startswith("a file"):
        target.parent.write_text("")
    else:
        target.mkdir(parents=True)
    with pytest.raises(TomatError, match="x.json cannot be written"):
        write_json(target, {})
    assert main(["tokens", "layouts", "--atoms", "4", "--json", str(target)]) == 2
    assert one_line(capfd.readouterr().err)
    assert [path.name for path in tmp_path.rglob("*")] == (
        ["place"] if where.startswith("a file") else ["place", "x.json"]
    )


def test_a_limit_of_the_system_leaves_what_was_there(tmp_path):
    """As a quota does it: a file may grow to some bytes and no further."""
    report = tmp_path / "x.json"
    report.write_text("before")
    limited = subprocess.run(
        tomat("tokens", "layouts", "--atoms", "4", "--json", report), capture_output=True, text=True, cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert limited.returncode == 2 and one_line(limited.stderr), limited.stderr
    assert report.read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("words", [["--json", "-"], []])
def test_standard_output_that_takes_no_more_is_one_line(words):
    with FULL.open("w") as full:
        done = subprocess.run(
            tomat("tokens", "layouts", "--atoms", "4", *words), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and one_line(done.stderr) and "No space left" in done.stderr, done.stderr


def test_a_name_that_is_no_text_is_shown(tmp_path):
    name = os.fsdecode(b"x\xff.cube")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from tomat.app.cli import main; from tomat.base.reporting import console\n"
         "main(['tokens', 'layouts', '--atoms', '4']); console.print(sys.argv[1])", name],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and r"x\udcff.cube" in done.stdout, done.stderr
