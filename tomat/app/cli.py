"""The `tomat` command. It parses the command line and calls a verb; it makes no decisions.

Each `*_verbs.py` beside this file registers its own verbs. It is imported only for these verbs and for `tomat --help`.
At import these modules load only argparse, the console and the report model, so that help and errors in the command
line appear at once, and a verb imports only what it uses.
"""

import argparse
import contextlib
import errno
import importlib
import io
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from tomat import __version__
from tomat.base.arguments import STANDARD_OUTPUT, Parser, first_verb, spelt_today
from tomat.base.errors import FULL_ERRNOS, RetryableError, TomatError
from tomat.base.layout import INTERRUPTED_STATUS, REFUSED_STATUS, RETRY_STATUS
from tomat.base.reporting import as_asked, leave_out_advice

logger = logging.getLogger(__name__)

VERBS = {
    "tomat.app.density_verbs": ("demo-data", "density"),
    "tomat.app.codec_verbs": ("codec", "promolecule"),
    "tomat.app.token_verbs": ("tokenize", "retokenize"),
    "tomat.app.shard_verbs": ("tokens", "shards"),
    "tomat.app.train_verbs": ("train",),
    "tomat.app.predict_verbs": ("predict",),
    "tomat.app.weights_verbs": ("export", "compress"),
    "tomat.app.eval_verbs": ("eval",),
    "tomat.app.mfu_verbs": ("mfu",),
    "tomat.app.profile_verbs": ("profile",),
    "tomat.app.plan_verbs": ("plan",),
    "tomat.app.lab_verbs": ("lab",),
    "tomat.app.bench_verbs": ("bench",),
    "tomat.app.launch_verbs": ("launch",),
    "tomat.app.runs_verbs": ("runs",),
    "tomat.app.page_verbs": ("page",),
    "tomat.app.doctor_verbs": ("doctor",),
}
"""Module -> the verbs that its `register` adds."""
DISK_ERRNOS = FULL_ERRNOS | {errno.EIO, errno.EROFS}
EXAMPLES = Path(__file__).with_name("examples.txt")
"""Example commands, which the help of each verb ends with."""
MOVED = {"help": "`tomat --help`", "small-models": "`python profiling/small_models.py` in a checkout of tomat"}
"""Former verb -> what replaces it."""


class _Version(argparse.Action):
    """Prints version and commit. The commit is looked up only here, because that takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        from tomat.base.shipped import commit

        print(f"tomat {__version__} ({commit() or 'not from a checkout'})")
        parser.exit()


def build_parser(words: Sequence[str] = ()) -> Parser:
    """The parser of the verb that a command line begins with; if it begins with none, of all verbs."""
    parser = Parser(
        prog="tomat",
        description="Transformers on the electron densities of crystals: data, training, evaluation, performance.",
        epilog="`tomat VERB --help` says the rest. Verbs that report figures write them with --json FILE, and with "
        "--json - to standard output. --quiet, --verbose and --log_level may stand before or "
        "after VERB. Flags may be written with dashes instead of underscores.",
    )
    text = "print version and commit, and exit"
    parser.add_argument("--version", action=_Version, nargs=0, help=text)
    parser.moved = MOVED
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _, verb = first_verb(words)
    named = [module for module, verbs in VERBS.items() if spelt_today(verb) in verbs]
    for module in named or VERBS:
        importlib.import_module(module).register(subparsers)
    for line in EXAMPLES.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{parser.prog} ") and line.split()[1] in subparsers.choices:
            shown = parser.verb_of(line.split()[1:])
            shown.examples = (*shown.examples, line)
    return parser


def main(argv: Sequence[str] | None = None, parser: Parser | None = None) -> int:
    """Run one verb. `argv` is the command line (None: of this process); a study passes a parser of its own.

    The exit status is what the verb returns (0 for success), or with one line on standard error: 2 for refused input,
    75 for storage that did not answer.
    """
    leave_out_advice()
    # gcsfs also logs the traceback of an error that it raises. Without a handler Python would print it.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    # A file name may contain bytes that are invalid in this encoding. They are shown as escapes.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    parser = parser or build_parser(words)
    with errors_told() as outcome:
        args, args.overrides = parser.parse_known_args(words)
        args.words = words
        with contextlib.ExitStack() as report:
            report.enter_context(as_asked(args))
            if getattr(args, "json", None) == STANDARD_OUTPUT:
                from tomat.base.reporting import json_on_standard_output

                args.json = report.enter_context(json_on_standard_output())
            # Arguments may contain line breaks and invalid bytes, which a log cannot take.
            said = shlex.join(words).encode("unicode_escape").decode()
            logger.info("tomat %s: %s", __version__, said)
            outcome.status = args.run(args)
        # An error of standard output is raised here, not with a traceback when the interpreter ends.
        sys.stdout.flush()
    return outcome.status


@contextlib.contextmanager
def errors_told() -> Iterator[SimpleNamespace]:
    """Turn a TomatError into one line on standard error and a `status`: 2, or 75 to try again; 0 without an error.

    The same applies to a full or failing disk, because standard output, temporary files and caches may lie on one. For
    output files that the user named, `tomat.base.reporting.writing` reports the error.
    """
    outcome = SimpleNamespace(status=0)
    try:
        yield outcome
    except TomatError as error:
        # A path or a value that the error names may hold line breaks.
        print("error:", *str(error).splitlines(), file=sys.stderr)
        outcome.status = RETRY_STATUS if isinstance(error, RetryableError) else REFUSED_STATUS
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        what = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {what}{error.strerror}. Make room, or write elsewhere.", file=sys.stderr)
        outcome.status = REFUSED_STATUS
        # When the interpreter ends, it would try again to write what standard output did not take.
        try:
            sys.stdout.flush()
        except OSError:
            with contextlib.suppress(OSError):
                sys.stdout.close()
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        outcome.status = INTERRUPTED_STATUS


if __name__ == "__main__":
    sys.exit(main())
