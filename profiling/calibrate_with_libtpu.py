"""`tomat plan --calibrate --kernels` with other versions of the compiler than the installed one.

A file of timings may hold kernels of several versions of the compiler, even of one chip: of openxla/tokamax's TPU7x the
backward pass of XLA's loss has the memory that libtpu 0.0.37 plans (21 of 21), all else that of 0.0.44 (84 of 87).
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from tomat.app.cli import main
from tomat.base.arguments import Parser, existing_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import write_report
from tomat.perf.plan.compile.topology import OtherLibtpu
from tomat.perf.timed_kernels.timings import read_timings
from tomat.report.pages.kernels_page import calibrate_kernels


def libtpu_in(folder: Path) -> OtherLibtpu:
    """The libtpu in a folder that `uv pip install --target FOLDER --no-deps libtpu==VERSION` has filled.

    Raises:
        TomatError: There is none.
    """
    versions = {found.version for found in importlib.metadata.distributions(name="libtpu", path=[str(folder)])}
    library = folder.absolute() / "libtpu" / "libtpu.so"
    if len(versions) != 1 or not library.is_file():
        raise TomatError(
            f"{folder} holds {', '.join(f'libtpu {version}' for version in sorted(versions)) or 'no libtpu'}"
            f"{'' if library.is_file() else ' and no libtpu/libtpu.so'}; expected one. Fill it with "
            f"`uv pip install --target {folder} --no-deps libtpu==VERSION`."
        )
    return OtherLibtpu(versions.pop(), library)


def read_compilers(words: Sequence[str]) -> dict[str, OtherLibtpu]:
    """Of `DIR`, the libtpu of all operations, by "", and any number of `OP=DIR`, that of one.

    Raises:
        TomatError: As for `libtpu_in`; or an operation, or all of them, would have two.
    """
    found: dict[str, OtherLibtpu] = {}
    for word in words:
        op, equals, folder = word.partition("=")
        if not (equals and op.isidentifier()):
            op, folder = "", word
        if op in found:
            raise TomatError(f"--libtpu gives two compilers of {op or 'all operations'}; expected one, or OP=DIR each.")
        found[op] = libtpu_in(Path(folder))
    return found


def build_parser() -> Parser:
    """The flags of this script: those of the verb, and the compilers."""
    parser = Parser(
        prog="python profiling/calibrate_with_libtpu.py",
        description="Compile timed kernels by the libtpu that they were timed with, fit the models of their chips to "
        "them, and write the record and the page.",
    )
    parser.add_argument("--kernels", type=existing_file, metavar="FILE", required=True, help="the kernel timings (CSV)")
    parser.add_argument(
        "--libtpu",
        action="append",
        required=True,
        metavar="[OP=]DIR",
        help="the compiler, or that of an operation (`uv pip install --target DIR --no-deps libtpu==V`); repeatable",
    )
    parser.add_argument(
        "--chip", action="append", default=[], metavar="NAME", help="only rows of this chip; repeatable"
    )
    parser.add_argument("--workers", type=positive_int, default=1, help="kernels at once (default: %(default)s)")
    parser.add_argument("--cache_dir", type=Path, help="what was compiled before (default: ~/.cache/tomat/plan)")
    parser.add_argument(
        "--tracking_dir", type=Path, default=Path("docs/tracking"), help="gets record and page (default: %(default)s)"
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the record also here")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --kernels timings.csv --chip v5p --libtpu libtpu-0.0.44",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Calibrate."""
    compilers = read_compilers(args.libtpu)
    there = sorted(
        {timing.op for timing in read_timings(args.kernels)[0] if timing.chip in (args.chip or [timing.chip])}
    )
    if unknown := sorted(compilers.keys() - {"", *there}):
        raise TomatError(f"--libtpu names the operation {unknown[0]}; the rows are of {', '.join(there)}.")
    record = calibrate_kernels(
        args.kernels,
        args.tracking_dir,
        cache_dir=args.cache_dir,
        chips=args.chip,
        workers=args.workers,
        compiler_of=lambda op: compilers.get(op, compilers.get("")),
    )
    write_report(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
