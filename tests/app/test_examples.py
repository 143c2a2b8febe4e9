"""The examples that the help of each verb ends with: those that take seconds run.

`tests/test_docs.py` holds that the command line takes the others."""

import shlex
import shutil
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest
from small_commands import VERBS
from tiny_run import TINY_FIELD

from tomat.app.cli import EXAMPLES, build_parser, main

ROOT = Path(__file__).parents[2]
LINES = [line for line in EXAMPLES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]

NOT_RUN = {
    "train --data.source folder": "trains a second time; tests/app/workflow/test_folder_run.py does",
    "eval": "takes two minutes of processor time, of which most is compiling",
    "predict --run": "compiles for 20 s; tests/predict/weights/test_folder.py predicts with a run",
    "runs serve": "serves until it is stopped; tests/report/dashboard/test_server.py asks it",
    "page plan.json": "needs a plan, which takes the TPU compiler; tests/report/html has the page of one",
    "plan": "needs the TPU compiler and minutes",
    "launch": "sends the commit of a checkout, which the folder is not; tests/launch runs it",
    "lab": "measures for minutes",
    "bench loss-tiles": "needs the TPU compiler and minutes",
    "bench attention-tiles": "needs the TPU compiler and minutes",
    "bench chip": "measures for minutes",
    "doctor": "compiles for some seconds; tests/app/test_doctor_verbs.py runs it",
}
"""Why, by the words that an example begins with."""


LESS = {"train": TINY_FIELD, "retokenize": ["--workers", "1"]}
"""Words by verb with which an example takes seconds."""


def why_not(line: str) -> str | None:
    return next((why for words, why in NOT_RUN.items() if f"{line} ".startswith(f"tomat {words} ")), None)


def test_the_help_of_every_verb_ends_with_its_examples():
    parser, shown = build_parser(), []
    for line in LINES:
        verb = parser.verb_of(shlex.split(line, comments=True)[1:])
        assert verb.format_help().rstrip().endswith("\n  " + "\n  ".join(verb.examples)), line
        shown += [verb.prog, *verb.prog.split(" ")[:-1]] if line in verb.examples else []
    verbs = {verb.prog for verb in VERBS.values()}
    assert verbs <= set(shown), f"without an example: {sorted(verbs - set(shown))}"
    assert max(map(len, LINES)) <= 110
    assert all(any(f"{line} ".startswith(f"tomat {words} ") for line in LINES) for words in NOT_RUN)


def beside(folder: Path) -> dict[str, Callable[[], object]]:
    """What an example needs that those before it have not made, by the words that it begins with."""
    tracked = "docs/tracking/lab"
    return {
        "density compare": lambda: shutil.copytree(folder / "out-atoms", folder / "out"),
        "runs compare": lambda: shutil.copytree(folder / "runs" / "demo", folder / "runs" / "other"),
        "page docs": lambda: shutil.copytree(ROOT / tracked, folder / tracked),
        "profile": lambda: shutil.copy(ROOT / "tests/fixtures/profiles/v6e_step.hlo.pb.gz", folder / "step.hlo.pb.gz"),
    }


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address, *_: not opened.append(address))
    prepare, failed, made = beside(tmp_path), [], 0
    for line in LINES:
        if why_not(line):
            continue
        for begin in [begin for begin in prepare if line.startswith(f"tomat {begin}")]:
            prepare.pop(begin)()
        words = shlex.split(line, comments=True)[1:]
        status = main([*words, *LESS.get(words[0], [])])
        told = capfd.readouterr()
        if status != 0:
            failed.append(f"{line}: {status}, {told.err[-500:]}")
        for flag, value in zip(words, words[1:], strict=False):
            if flag in ("--output", "--picture", "--json"):
                assert Path(value).exists(), f"{line} made no {value}"
                made += 1
    assert not failed and not prepare and len(opened) == 1 and made > 8, "\n".join(failed)
