"""How much is said: what is left out of what, for every verb, before and after its name."""

import logging
import re
import subprocess
import sys

import pytest
from small_commands import VERBS
from small_promolecule import promolecule, skewed

from tomat.app.cli import build_parser, main
from tomat.base import reporting
from tomat.base.arguments import first_verb
from tomat.base.reporting import chosen


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, list[str]]:
    """A verb that predicts, with a bar, and one that fits, each the same each time."""
    place = tmp_path_factory.mktemp("said")
    (place / "atoms.json").write_text(promolecule().to_text())
    skewed().to(filename=str(place / "a.cif"))
    words = ["--promolecule", str(place / "atoms.json"), "--structure", str(place / "a.cif"), "--valences", "Na=1,F=7"]
    density = str(place / "LiF.cube")
    assert main(["density", "convert", "--demo", "LiF-rock-salt-ideal", "--output", density]) == 0
    out = str(place / "out")
    assert main(["predict", *words, "--grid", "6", "8", "8", "--output", out]) == 0
    return {
        "predict": ["predict", *words, "--grid", "6", "8", "8", "--output", out],
        "codec": ["codec", "fit", "--input", density, "--bins", "16", "--output", str(place / "codec")],
    }


ON_THE_WAY = {
    "predict": ("1 structure for", "note: the promolecule", "grid: --grid"),
    "codec": ("Fitting 16 bins",),
}


@pytest.mark.parametrize("verb", ON_THE_WAY)
def test_quiet_leaves_results_and_verbose_takes_nothing_away(verb, commands, capfd, monkeypatch):
    monkeypatch.setattr(reporting.console, "_width", 2000)  # one line each
    words, said, logged = commands[verb], {}, {}
    for how in ("--quiet", "", "--verbose", "--log_level=debug"):
        capfd.readouterr()
        assert main([*words, *filter(None, [how])]) == 0
        told = capfd.readouterr()
        lines = [" ".join(line.split()) for line in told.out.splitlines()]
        # A bar, or in a pipe lines of how far it is, whose times are those of the day.
        bars = [line for line in lines if "\u2501" in line or re.search(r": \d+ of \d+ after \d+ s", line)]
        assert bool(bars) == (how != "--quiet")
        said[how], logged[how] = [line for line in lines if line not in bars], told.err
    left_out = [line for line in said[""] if line not in said["--quiet"]]
    # Every result is there, and nothing that is left out is one.
    assert [line for line in said[""] if line not in left_out] == said["--quiet"] and said["--quiet"]
    assert all(line.startswith(start) for line, start in zip(left_out, ON_THE_WAY[verb], strict=True))
    assert said[""] == said["--verbose"] == said["--log_level=debug"]
    assert logged[""] == logged["--quiet"] == ""
    assert all("INFO tomat.app.cli: tomat" in logged[how] for how in ("--verbose", "--log_level=debug"))


def test_they_stand_before_and_after_every_verb():
    # Every parser, so that what stands between the words of a verb counts too.
    parser = build_parser()
    for verb in VERBS:
        for taken in (parser.verb_of([]), parser.verb_of(verb.split()[:1]), parser.verb_of(verb.split())):
            assert {"--quiet", "--verbose", "--log_level"} <= set(taken._option_string_actions), verb
    first, *rest = "runs", "list"
    for words in (["--quiet", first, *rest], [first, "--quiet", *rest], [first, *rest, "--quiet"]):
        args, _ = build_parser(words).parse_known_args(words)
        assert args.quiet and not hasattr(args, "log_level") and args.place
    assert first_verb(["--log-level", "info", "--quiet", "demo_data", "show"]) == (3, "demo_data")
    assert first_verb(["--quiet"]) == (1, "")


def test_warnings_are_said_and_everything_is_as_before_afterwards(capfd, tmp_path):
    root, before = logging.getLogger(), vars(chosen).copy()
    handlers, level = list(root.handlers), root.level
    assert main(["--quiet", "runs", "list", str(tmp_path / "nowhere")]) == 2
    assert "error: " in capfd.readouterr().err
    assert main(["demo-data", "show", "--log_level", "debug"]) == 0
    assert (root.handlers, root.level, vars(chosen)) == (handlers, level, before)


LIBRARY = """
import argparse, logging
from rigging.log_setup import configure_logging
from tomat.base.reporting import as_asked, level_log

for asked in ("error", "debug"):
    with as_asked(argparse.Namespace(log_level=asked)):
        configure_logging(logging.INFO)
        level_log()
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("a.library").log(level, "%s %s", asked, logging.getLevelName(level))
"""


def test_the_level_holds_where_a_library_sets_up_the_log_as_it_likes():
    """What Levanter sets it up with takes all handlers away, and logs from info on."""
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True)
    said = [" ".join(line.split()[-2:]) for line in done.stderr.splitlines()]
    assert said == ["error ERROR", "debug DEBUG", "debug INFO", "debug WARNING", "debug ERROR"]
