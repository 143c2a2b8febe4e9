"""Damaged command lines: each is refused in one line with status 2, answered with help, or taken; nothing else."""

import argparse
import builtins
import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tomat.app.cli import build_parser, main
from tomat.base.arguments import Parser
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.train.settings.keys import check_words
from tomat.train.settings.schema import RunSchema

HEAVY = {"jax", "levanter", "haliax", "equinox", "numpy", "pymatgen", "scipy", "matplotlib", "tensorstore", "xprof"}
CONFIGS = Path(__file__).parents[2] / "configs"


def taken(args: argparse.Namespace) -> int:
    """In place of every verb: what those that take overrides look at first, and no work."""
    if getattr(args, "takes_overrides", False):
        schema = RetokenizeConfig if hasattr(args, "runner") else RunSchema
        check_words(args.leave_one_out if hasattr(args, "leave_one_out") else args.config_path, args.overrides, schema)
    return 0


def verbs(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """Every verb's words and flags; its function is replaced by `taken`."""
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not choices:
        parser.set_defaults(run=taken)
        return {words: [flag for action in parser._actions for flag in action.option_strings]}
    found = {}
    for name, below in (choices[0] or {}).items():
        found |= verbs(below, (*words, name))
    return found


PARSER: Parser = build_parser()
VERBS = verbs(PARSER)
FLAGS = sorted({flag for flags in VERBS.values() for flag in flags})
KEYS = (
    "run_name trainer.num_train_steps trainer.checkpointer.keep model.splash.block_q loss.kind data.shuffle optimizer "
    "block_rows valences.Si"
).split()
VALUES = [
    *"- -- 0 1 -1 3.5 nan -inf 1e999 1_0 two null true [ {a {} 2026-13-01 ../.. v6e-16 crps a,b %s {0}".split(),
    *"train validation runs/demo gs://bucket/x /dev/null/x !!python/name:os.system".split(),
    *("", "9" * 400, "n" * 300, "{kind: crps}", "&a [*a]", "a\nb", "\u2028", "\udcff"),
    *map(str, (CONFIGS / "train" / "demo-decoder.yaml", CONFIGS / "tokenize" / "v3-p19.yaml", CONFIGS)),
]


@st.composite
def misspelt(draw, words) -> str:
    """A word with a character lost, doubled or exchanged."""
    word = draw(words)
    place = draw(st.integers(0, max(len(word) - 1, 0)))
    return (
        word[:place]
        + draw(st.sampled_from(["", word[place : place + 1] * 2, "-", "_", ".", "=", " "]))
        + word[place + 1 :]
    )


@st.composite
def command_lines(draw) -> list[str]:
    """A verb with flags, overrides and values, any of them damaged."""
    verb = draw(st.sampled_from(sorted(VERBS)))
    values = st.one_of(st.sampled_from(VALUES), st.text(st.characters(exclude_characters="\0"), max_size=12))
    flags = st.sampled_from(VERBS[verb]) | st.sampled_from(FLAGS)
    keys = st.sampled_from(KEYS).map(lambda key: f"--{key}")
    name = st.one_of(flags, keys, misspelt(flags), misspelt(keys), flags.map(lambda flag: flag.replace("_", "-")))
    piece = st.one_of(
        st.tuples(name, values),
        st.tuples(name),
        st.tuples(values),
        st.builds(lambda left, right: (f"{left}={right}",), name, values),
    )
    words = list(verb)
    if draw(st.integers(0, 9)) == 0:
        words[-1] = draw(misspelt(st.just(words[-1])))
    for part in draw(st.lists(piece, max_size=6)):
        words += part
    return words


@settings(
    max_examples=600, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(command_lines())
def test_a_damaged_command_line_is_refused_in_one_line(words):
    imported = set()
    real_import = builtins.__import__

    def watched(name, *args, **kwargs):
        imported.add(name.partition(".")[0])
        return real_import(name, *args, **kwargs)

    out, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtins, "__import__", watched)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            try:
                status = main(words, PARSER)
            except SystemExit as ended:  # help
                status = ended.code
                assert out.getvalue(), words
    assert not imported & HEAVY, words
    assert status in (0, 2), words
    # The log stands beside, where --verbose or --log_level is among the words.
    said = [line for line in told.getvalue().splitlines() if not line.startswith(("INFO ", "DEBUG "))]
    if status == 2:
        assert len(said) == 1 and said[0].startswith("error: "), told.getvalue()
        assert not out.getvalue()
    else:
        assert not said, words
