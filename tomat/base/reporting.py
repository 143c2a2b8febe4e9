"""What every verb prints and writes alike, and how much: JSON reports, the console, `--quiet`, `--verbose`, the log.

Results, what was written, warnings and errors are always printed. `--quiet` leaves out what is printed on the way to
them (`tell`, bars and stages). The log is that of Python's `logging`, so of JAX, Levanter and all other libraries. It
goes to standard error; compilers and measurements run in processes of their own, which log nothing there.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from tomat.base.errors import PASSING_ERRNOS, RetryableError, TomatError


@dataclass
class Verbosity:
    quiet: bool = False
    log_level: int = logging.WARNING
    """Least level that is logged to the terminal."""
    logs: bool = False
    """Whether a level was asked for. Otherwise libraries log as they do by themselves: only warnings."""


chosen = Verbosity()
"""The verbosity of the verb that runs."""


def plain_console(**settings: Any) -> Console:
    """A console that shows every text as it is, in tables too. Rich's own console takes `[...]` and `:...:` in a path
    or another program's output for markup, and drops them. A style is named: `style=`, or a `Text`.

    In a notebook it prints text, as into a file: Rich's HTML needs widgets for its bars, and ipykernel sets
    FORCE_COLOR, which makes Rich take the output for a terminal.
    """
    notebook = {"force_jupyter": False, "force_terminal": False} if "ipykernel" in sys.modules else {}
    return Console(markup=False, emoji=False, **{**notebook, **settings})


console = plain_console(width=None if sys.stdout.isatty() else 132)
"""Standard output. In a pipe or a file, where Rich would assume 80 columns, tables get the width they need."""


def tell(*what: Any, **how: Any) -> None:
    """Print a remark on the way to a result: what was decided, is waited for or might help. With `--quiet` print
    nothing. The arguments are those of `Console.print`."""
    if not chosen.quiet:
        console.print(*what, **how)


def waiting(text: str) -> contextlib.AbstractContextManager[Any]:
    """On a terminal, a sign that something is done while the context is open."""
    return contextlib.nullcontext() if chosen.quiet else console.status(Text(text))


def warn(text: str) -> None:
    """Print a warning on standard output, like the results that it belongs to."""
    console.print(Text.assemble(("warning:", "yellow"), " ", text))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 chunk`, `2 chunks`, `1,024 chunks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def is_or_are(number: int) -> str:
    """The verb after `counted`."""
    return "is" if number == 1 else "are"


def readable_bytes(count: int) -> str:
    """`count` as KiB, MiB, GiB or TiB with three digits; 1,000 to 1,023 of a unit have four."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    shown = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return f"{shown} {'byte' if count == 1 else units[0]}"


def first_line(error: BaseException) -> str:
    """The beginning of what `error` says, on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "..."


@contextlib.contextmanager
def naming(what: str, remedy: str) -> Iterator[None]:
    """Turn what libraries raise in the block for a damaged file into one TomatError: `what` is wrong, what was raised,
    and the `remedy`. A TomatError or MemoryError passes unchanged."""
    try:
        yield
    except (TomatError, MemoryError):
        raise
    except Exception as error:
        raise TomatError(f"{what} ({type(error).__name__}: {first_line(error)}){remedy}") from error


def to_jsonable(value: Any) -> Any:
    """`value` with NumPy scalars and arrays, tuples and paths as JSON has them; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool | int | str) or value is None:
        return value
    return str(value)


def dump_json(value: Mapping[str, Any]) -> str:
    """`value` as JSON text, the same bytes for the same content: sorted keys, indent 2, final newline."""
    return json.dumps(to_jsonable(value), indent=2, sort_keys=True, allow_nan=False) + "\n"


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str], remedy: str = "Make room, change its rights, or name another place."
) -> Iterator[None]:
    """A block for everything that writes to the file or folder `path`. A full disk, missing rights or something in the
    way become a TomatError, a disk that does not answer a `RetryableError`. `remedy` says what to do."""
    try:
        yield
    except OSError as error:
        said = f"{path} cannot be written: {error.strerror or first_line(error)}."
        if error.errno in PASSING_ERRNOS:
            raise RetryableError(f"{said} Try again.") from error
        raise TomatError(f"{said} {remedy}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to. If the block ends without an error, what lies there replaces `path` in one step.

    It has the suffix of `path`, by which libraries choose a format or a compression, and lies on the same disk. The
    folder of `path` is made if it is missing. After an error, as in `writing`, what was there before is unchanged.
    """
    target = Path(path)
    # A device or a pipe, such as /dev/stdout, is written to, and not replaced by a file.
    stream = target.exists() and not target.is_file()
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = {} if stream else {"dir": target.parent, "prefix": f".{target.name}."}
        with tempfile.TemporaryDirectory(**beside) as folder:
            temporary = Path(folder) / target.name
            yield temporary
            if stream:
                target.write_bytes(temporary.read_bytes())
            else:
                os.replace(temporary, target)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the local file `path` in one step: a reader sees the old content or the new, never a part."""
    with replacing(path) as temporary:
        # Half of a surrogate pair, as damaged JSON can hold, is written as its escape.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    write_text(path, dump_json(value))


def write_report(path: Path | None, figures: Mapping[str, Any]) -> None:
    if path is not None:
        write_json(path, figures)


@contextlib.contextmanager
def json_on_standard_output() -> Iterator[Path]:
    """A file for the report of `--json -`: its content at the end goes to standard output. Everything that is printed
    meanwhile, also by child processes, goes to standard error."""
    with tempfile.TemporaryDirectory(prefix="tomat-json-") as folder:
        report = Path(folder) / "report.json"
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield report
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            # A verb that ends with an error may have written its report before.
            if report.exists():
                sys.stdout.write(report.read_text(encoding="utf-8"))
                sys.stdout.flush()


@contextlib.contextmanager
def as_asked(args: argparse.Namespace) -> Iterator[None]:
    """Apply the verbosity that the flags ask for in the block, and restore the earlier one after it."""
    quiet, verbose = getattr(args, "quiet", False), getattr(args, "verbose", False)
    if quiet and verbose:
        raise TomatError("--quiet and --verbose are both given; leave one of them out.")
    asked = getattr(args, "log_level", "info" if verbose else None)
    before, root = vars(chosen).copy(), logging.getLogger()
    root_before, level_before = list(root.handlers), root.level
    level = logging.WARNING if asked is None else logging.getLevelNamesMapping()[asked.upper()]
    chosen.quiet, chosen.log_level, chosen.logs = quiet, level, asked is not None
    level_log()
    try:
        yield
    finally:
        vars(chosen).update(before)
        if asked is not None:
            root.setLevel(level_before)
            for handler in root.handlers[:]:
                if isinstance(handler, _Terminal) and handler not in root_before:
                    root.removeHandler(handler)


def leave_out_advice() -> None:
    """Suppress the advice of Levanter's imports on every start, which does not apply here: transformers advises to
    install PyTorch, and, in a notebook, tqdm to install widgets for bars that tomat does not draw."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.filterwarnings("ignore", message="IProgress not found")


def level_log() -> None:
    """Make the terminal's handlers log from the chosen level on. This is needed again after a library has set up the
    log (Levanter 0.2.227 removes all handlers that were there)."""
    root = logging.getLogger()
    kinds = (logging.StreamHandler, _Terminal)
    terminals = [cast(logging.StreamHandler, one) for one in root.handlers if type(one) in kinds]
    if chosen.logs:
        root.setLevel(min(chosen.log_level, root.level))
        if all(handler.stream is not sys.stderr for handler in terminals):
            terminals.append(_Terminal(sys.stderr))
            terminals[-1].setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            root.addHandler(terminals[-1])
    for handler in terminals:
        handler.setLevel(chosen.log_level)


class _Terminal(logging.StreamHandler):
    """The handler of this module."""
