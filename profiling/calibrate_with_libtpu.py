"""`tomat plan --calibrate --kernels` for openxla/tokamax's timings, with the compiler versions they were made with.

tokamax builds the programs (`calibrate_with_libtpu_programs.py`). A file of timings may mix compiler versions, even for
one chip. In openxla/tokamax's file for TPU7x, the backward pass of XLA's loss has the memory that libtpu 0.0.37 plans
(21 of 21 rows), and everything else that of libtpu 0.0.44 (84 of 87).
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tomat.app.cli import main
from tomat.base.arguments import Parser, existing_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import write_report
from tomat.perf.timed_kernels.programs import Compiler, installed_compiler
from tomat.perf.timed_kernels.timings import KernelTiming, RefusedRow, read_cells, read_timings
from tomat.report.pages.calibration_page import calibrate_kernels


def libtpu_in(folder: Path) -> Compiler:
    """The libtpu in a folder that `uv pip install --target FOLDER --no-deps libtpu==VERSION` has filled.

    Raises:
        TomatError: The folder has no libtpu, or several.
    """
    versions = {found.version for found in importlib.metadata.distributions(name="libtpu", path=[str(folder)])}
    library = folder.absolute() / "libtpu" / "libtpu.so"
    if len(versions) != 1 or not library.is_file():
        raise TomatError(
            f"{folder} holds {', '.join(f'libtpu {version}' for version in sorted(versions)) or 'no libtpu'}"
            f"{'' if library.is_file() else ' and no libtpu/libtpu.so'}; expected one. Fill it with "
            f"`uv pip install --target {folder} --no-deps libtpu==VERSION`."
        )
    return Compiler(f"libtpu {versions.pop()}", library)


def read_compilers(words: Sequence[str]) -> dict[str, Compiler]:
    """Operation -> its compiler, from words `OP=DIR`. A word `DIR` gives the one of all other operations, under "".

    Raises:
        TomatError: As for `libtpu_in`; or two words name the same operation, or none.
    """
    found: dict[str, Compiler] = {}
    for word in words:
        op, equals, folder = word.partition("=")
        if not (equals and op.isidentifier()):
            op, folder = "", word
        if op in found:
            raise TomatError(f"--libtpu gives two compilers of {op or 'all operations'}; expected one, or OP=DIR each.")
        found[op] = libtpu_in(Path(folder))
    return found


PROGRAMS = "calibrate_with_libtpu_programs"
"""The module beside this one that compiles a row."""


def read_tokamax(path: Path) -> tuple[list[KernelTiming], list[RefusedRow]]:
    """`read_timings`, with corrected memory for rows that give it in mebibytes and not in megabytes.

    All rows of one operation on one chip come from one version of tokamax, and some versions wrote mebibytes. Such an
    operation has a number that is a whole number of bytes only if read as mebibytes. In the file of 2026-08-21, the 313
    rows of six operations of TPU7x are whole bytes only as mebibytes; the other 1,635 rows are whole as megabytes.
    """
    timings, refused = read_timings(path)
    cells = dict(read_cells(path))
    written = {row.line: float(cells[row.line]["peak_memory_mb"] or 0) for row in timings}

    def in_mebibytes(number: float) -> bool:
        return abs(1e6 * number - round(1e6 * number)) > 1e-3 and (2**20 * number).is_integer()

    wrong = {(row.chip, row.op) for row in timings if in_mebibytes(written[row.line])}
    for place, row in enumerate(timings):
        if (row.chip, row.op) in wrong and row.peak_memory_bytes is not None:
            timings[place] = dataclasses.replace(row, peak_memory_bytes=round(2**20 * written[row.line]))
    return timings, refused


def decided_by() -> str:
    """An identity of what decides the programs besides tomat and the compiler: tokamax's version and a source hash."""
    if importlib.util.find_spec("tokamax") is None:
        how = "install it with `uv sync --extra plan --extra calibrate`"
        raise TomatError(f"tokamax, whose programs the timed kernels are, is not installed; {how}.")
    source = Path(__file__).with_name(f"{PROGRAMS}.py").read_bytes()
    return f"tokamax {importlib.metadata.version('tokamax')} {hashlib.sha256(source).hexdigest()}"


def build_parser() -> Parser:
    """The argument parser of this script: flags of the verb, and the compilers."""
    parser = Parser(
        prog="python profiling/calibrate_with_libtpu.py",
        description="Compile timed kernels by the libtpu that they were timed with, fit the models of their chips to "
        "them, and write the record and the page.",
    )
    parser.add_argument("--kernels", type=existing_file, metavar="FILE", required=True, help="the kernel timings (CSV)")
    parser.add_argument(
        "--libtpu",
        action="append",
        default=[],
        metavar="[OP=]DIR",
        help="the compiler, or that of an operation (`uv pip install --target DIR --no-deps libtpu==V`); repeatable; "
        "default: the installed one",
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
    """Calibrate the chips of a file of timings."""
    compilers = read_compilers(args.libtpu)
    there = sorted(
        {timing.op for timing in read_timings(args.kernels)[0] if timing.chip in (args.chip or [timing.chip])}
    )
    if unknown := sorted(compilers.keys() - {"", *there}):
        raise TomatError(f"--libtpu names the operation {unknown[0]}; the rows are of {', '.join(there)}.")
    # The compile processes need PYTHONPATH to find the module beside this one.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    record = calibrate_kernels(
        args.kernels,
        args.tracking_dir,
        cache_dir=args.cache_dir,
        chips=args.chip,
        read=read_tokamax,
        child=PROGRAMS,
        decided_by=decided_by(),
        workers=args.workers,
        compiler_of=lambda op: compilers.get(op) or compilers.get("") or installed_compiler(op),
    )
    write_report(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
