"""Every verb shows paths, names and purposes letter by letter, none read as the console's markup; and what it cannot
write is one line and status 2: a full disk, a file in a folder's place."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from json_keys import BEFORE, assert_keys_of_before
from small_commands import TOO_LONG, VERBS, is_too_long, required_words, small_commands
from tiny_run import tomat

from tomat.app.cli import main
from tomat.base import reporting
from tomat.base.errors import TomatError
from tomat.base.reporting import write_json

WORD = "qa[bold]bq"
"""Without its markup it would be `qabq`."""
FOLDERS = Path("x[", "b] :dog:")
"""As a path, `x[/b] :dog:`, which closes what nothing has opened."""
FULL = Path("/dev/full")
full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full: no file that is always full")
SOURCES = sorted((Path(__file__).parents[2] / "tomat").rglob("*.py"))


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """No word is folded into two lines of a cell."""
    monkeypatch.setattr(reporting.console, "_width", 2000)


def shown(text: str) -> set[str]:
    """Every form in which the word is there."""
    return set(re.findall(r"qa.{0,12}?bq", text))


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, list[str]]:
    return small_commands(tmp_path_factory.mktemp("verbs") / FOLDERS, WORD)


def test_every_verb_shows_every_letter_and_writes_the_keys_of_before(commands, tmp_path, capfd):
    capfd.readouterr()
    wrong, named, reports = {}, 0, {}
    report = tmp_path / "report.json"
    for verb, words in commands.items():
        writes = "--json" in VERBS[verb]._option_string_actions
        status = main([*words, "--json", str(report)] if writes else words)
        said = "".join(capfd.readouterr())
        if status or shown(said) - {WORD, quote(WORD)}:
            wrong[verb] = said
        named += WORD in said
        if writes:
            reports[verb] = json.loads(report.read_text())
            report.unlink()
    assert not wrong
    assert named >= 12 and {*commands, *filter(is_too_long, VERBS)} == {*VERBS}
    assert all(any(verb == one or verb.startswith(f"{one} ") for verb in VERBS) for one in TOO_LONG)
    assert {verb for verb in BEFORE if not is_too_long(verb)} == {*reports}
    for verb, written in reports.items():
        assert_keys_of_before(verb, written)


@pytest.mark.parametrize(
    "verb", [verb for verb in filter(is_too_long, VERBS) if any(action.required for action in VERBS[verb]._actions)]
)
def test_a_refusal_names_the_file_as_it_is_called(verb, tmp_path, capfd):
    """Of verbs that would take long: what they are to read is damaged."""
    folder = tmp_path / FOLDERS / WORD
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("a: [")
    words = required_words(verb, str(folder / "config.yaml"), str(folder))
    status = main([*verb.split(), *words])
    told = capfd.readouterr()
    assert status == 2 and told.err.count("\n") == 1, told
    assert WORD in told.err and str(FOLDERS) in told.err


MARKUP = re.compile(
    r"\[/?(bold|dim|italic|red|green|yellow|blue|cyan)\b[^]]*\]|from_markup|render_markup|rich\.(panel|prompt|logging)"
    r"|\bConsole\(|TextColumn\((?!\"\w+\"\)|.*markup=False)|\.status\(f|markup=True"
)
"""What Rich reads markup in whatever the console says: a column of a progress bar, a status, titles of panels."""


def test_there_is_one_console_and_no_other_way_to_markup():
    lines = [(path.name, line) for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines()]
    [(name, console)] = [(name, line) for name, line in lines if MARKUP.search(line)]
    assert name == "reporting.py" and "markup=False" in console


def flags(verb: str) -> set[str]:
    return {flag for action in VERBS[verb]._actions for flag in action.option_strings}


def one_line(told: str) -> bool:
    lines = told.splitlines()
    return len([line for line in lines if line.startswith("error: ")]) == 1 and "Traceback" not in told


@full_device
def test_a_report_that_the_disk_does_not_take_is_one_line(commands, tmp_path, capfd):
    reports = [verb for verb in VERBS if "--json" in flags(verb) and not is_too_long(verb)]
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


def test_what_is_in_the_way_is_one_line(tmp_path, capfd):
    """Found at the command line where that is possible, and where not, when it is written."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "x.json").mkdir(parents=True)
    for target in (tmp_path / "file" / "x.json", tmp_path / "folder" / "x.json"):
        with pytest.raises(TomatError, match="x.json cannot be written"):
            write_json(target, {})
        assert main(["demo-data", "show", "--json", str(target)]) == 2
        assert one_line(capfd.readouterr().err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "x.json"]


def test_a_limit_of_the_system_leaves_what_was_there(tmp_path):
    """As a quota does it: no file may grow."""
    report = tmp_path / "x.json"
    report.write_text("before")
    words = tomat("demo-data", "show", "--json", report)
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "-", *words], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert limited.returncode == 2 and one_line(limited.stderr), limited.stderr
    assert report.read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["x.json"]


@full_device
@pytest.mark.parametrize("words", [["--json", "-"], []])
def test_standard_output_that_takes_no_more_is_one_line(words):
    with FULL.open("w") as full:
        done = subprocess.run(tomat("demo-data", "show", *words), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and one_line(done.stderr) and "No space left" in done.stderr, done.stderr


def test_a_name_that_is_no_text_is_shown():
    code = "import sys; from tomat.app.cli import main; from tomat.base.reporting import console\n"
    code += "main(['demo-data', 'show']); console.print(sys.argv[1])"
    name = os.fsdecode(b"x\xff.cube")
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
    assert done.returncode == 0 and r"x\udcff.cube" in done.stdout, done.stderr
