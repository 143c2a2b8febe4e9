"""Paths, names and purposes are shown letter by letter, by every verb: none is read as the console's markup."""

import ast
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from small_commands import TOO_LONG, VERBS, make_run, small_commands, why_not

from tomat.app.cli import main
from tomat.base import reporting
from tomat.base.reporting import plain_console

WORD = "qa[bold]bq"
"""Without its markup it would be `qabq`."""
FOLDERS = Path("x[", "b] :dog:")
"""As a path, `x[/b] :dog:`, which closes what nothing has opened."""
SOURCES = sorted((Path(__file__).parents[2] / "tomat").rglob("*.py"))


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """No word is folded into two lines of a cell."""
    monkeypatch.setattr(reporting.console, "_width", 2000)


def shown(text: str) -> set[str]:
    """Every form in which the word is there."""
    return set(re.findall(r"qa.{0,12}?bq", text))


def test_every_verb_shows_every_letter(tmp_path, capfd):
    commands = small_commands(tmp_path / FOLDERS, WORD)
    capfd.readouterr()
    wrong, named = {}, 0
    for verb, words in commands.items():
        status = main(words)
        said = "".join(capfd.readouterr())
        if status or shown(said) - {WORD, quote(WORD)}:
            wrong[verb] = said
        named += WORD in said
    assert not wrong
    assert named >= 12 and {*commands, *filter(why_not, VERBS)} == {*VERBS}
    assert all(any(verb == one or verb.startswith(f"{one} ") for verb in VERBS) for one in TOO_LONG)


def test_a_purpose_is_shown_as_it_was_given(tmp_path, capfd):
    make_run(tmp_path / WORD, "see [/red] and :dog:")
    assert main(["runs", "show", str(tmp_path / WORD)]) == 0
    assert "see [/red] and :dog:" in capfd.readouterr().out


@pytest.mark.parametrize(
    "verb", [verb for verb in filter(why_not, VERBS) if any(action.required for action in VERBS[verb]._actions)]
)
def test_a_refusal_names_the_file_as_it_is_called(verb, tmp_path, capfd):
    """Of verbs that would take long: what they are to read is damaged."""
    folder = tmp_path / FOLDERS / WORD
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("a: [")
    words = [str(folder)] if verb == "runs serve" else []
    for action in VERBS[verb]._actions:
        if action.required:
            place = folder if action.dest in ("run_dir", "folders", "input") else folder / "config.yaml"
            words += [*action.option_strings[:1], "4" if action.dest == "bits" else str(place)]
    flags = {"launch": ["--zone", "z"], "plan": ["--config_path", str(folder / "config.yaml")]}
    status = main([*verb.split(), *words, *flags.get(verb, [])])
    told = capfd.readouterr()
    assert status == 2 and told.err.count("\n") == 1, told
    assert WORD in told.err and str(FOLDERS) in told.err


def test_there_is_one_console_and_no_other_way_to_markup():
    """What Rich reads markup in whatever the console says: a column of a progress bar, a status, titles of panels."""
    found = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.search(r"\[/?(bold|dim|italic|red|green|yellow|blue|cyan)\b[^]]*\]", node.value):
                    found.append(f"{path}:{node.lineno}: {node.value}")
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            of_text = node.args and isinstance(node.args[0], ast.JoinedStr)
            if (
                (name == "Console" and path.name != "reporting.py")
                or (
                    name == "TextColumn" and of_text is not None and given.get("markup") != "False" and not _fixed(node)
                )
                or name in ("from_markup", "render_markup", "Panel", "Prompt", "RichHandler")
                or (name == "status" and of_text)
                or given.get("markup") == "True"
            ):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def _fixed(node: ast.Call) -> bool:
    """Whether a column's text has no field."""
    return isinstance(node.args[0], ast.Constant) and "{" not in node.args[0].value


def test_a_console_shows_what_it_is_given(capsys):
    plain_console(width=200).print("a[bold]b [/x] :dog: [link=x]")
    assert capsys.readouterr().out == "a[bold]b [/x] :dog: [link=x]\n"
    reporting.warn("[/x]")
    assert capsys.readouterr().out == "warning: [/x]\n"
