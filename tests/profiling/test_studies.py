"""What every study's command line has in common with the verbs'."""

import argparse
import importlib
import shlex
from pathlib import Path

import pytest
from files_aside import parser_without_files

from tomat.app.cli import main
from tomat.base.arguments import existing_file, report_file

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path.stem for path in (ROOT / "profiling").glob("*.py") if "def build_parser(" in path.read_text())


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_refuses_in_one_line_and_says_what_its_flags_are(study, capsys):
    parser = importlib.import_module(study).build_parser()
    words = []
    one_of = [group._group_actions[0] for group in parser._mutually_exclusive_groups if group.required]
    for action in parser._actions:
        if action.required or action in one_of:
            place = __file__ if action.type is existing_file else ROOT / "tests" / "fixtures" / "run"
            words += [*action.option_strings[:1], str(place)]
    capsys.readouterr()  # what packages say as a study imports them
    assert main([*words, "--no_such_flag"], parser) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and "no_such_flag" in told
    assert parser.description and parser.get_default("run") is not None
    for action in parser._actions:
        assert len(action.help or "") > 5 and action.help != argparse.SUPPRESS, action.dest
        assert action.dest != "json" or action.type is report_file
    assert "json" in {action.dest for action in parser._actions}
    for line in parser.examples:
        assert parser_without_files(parser).parse_args(shlex.split(line.removeprefix(parser.prog)))
