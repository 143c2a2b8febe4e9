"""Measures the time and memory for reading a large trace and breaking it down."""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from own_process import in_own_process

from tomat.app.cli import main
from tomat.base.arguments import Parser, existing_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.memory import peak_memory_bytes
from tomat.base.reporting import console, write_report

GOAL_SECONDS, GOAL_BYTES = 10.0, 2 * 10**9


def build_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(
        prog="python profiling/parse_speed.py",
        description="Build the trace of a TPU that executes a module, read it in a process of its own, and report the "
        "time and the peak of memory.",
    )
    parser.add_argument(
        "--events", type=positive_int, default=1_000_000, help="events of the trace (default: %(default)s)"
    )
    parser.add_argument(
        "--hlo", type=existing_file, required=True, help="optimised HLO module (text or proto) to execute"
    )
    parser.add_argument("--device_kind", default="TPU v6 lite", help="JAX's name of the chip (default: %(default)s)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --hlo tests/fixtures/profiles/v6e_step.hlo.pb.gz --events 10000",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Build a TPU trace of the module, parse it in a fresh process, print wall and CPU time and peak memory."""
    if args.events < 1000:
        raise TomatError(f"--events is {args.events}; expected at least 1,000.")
    with tempfile.TemporaryDirectory(prefix="tomat-bench-") as scratch:
        trace = Path(scratch) / "bench.xplane.pb"
        events = write_bench_trace(args.hlo, args.device_kind, args.events, trace)
        size = trace.stat().st_size
        parsed = in_own_process(partial(parse_and_measure, trace), "the parser of the built trace", "lower --events")
    figures = {"events": events, "file_bytes": size, **parsed}
    console.print(
        f"{figures['events']:,} events, {size / 1e6:.1f} MB: {figures['wall_seconds']:.2f} s wall, "
        f"{figures['cpu_seconds']:.2f} s CPU (goal under {GOAL_SECONDS:.0f} s), imports included; peak memory "
        f"{figures['peak_memory_bytes'] / 1e9:.2f} GB (goal under {GOAL_BYTES / 1e9:.0f} GB)"
    )
    write_report(args.json, figures)
    return 0


def write_bench_trace(hlo: Path, device_kind: str, n_events: int, path: Path) -> int:
    """Write a one-device TPU trace of at least `n_events` events, with as many steps of the module as needed.

    Returns:
        The number of events written.
    """
    from trace_builder import build_xspace, serialise_program

    from tomat.perf.profile.breakdown import Roofs
    from tomat.perf.profile.hlo import Instruction
    from tomat.perf.profile.hlo_files import load_program
    from tomat.perf.profile.program_breakdown import compiler_seconds
    from tomat.perf.profile.protos import new_message

    program = load_program(hlo)
    roofs = Roofs.of_device_kind(device_kind)

    def built(n_steps: int) -> bytes:
        def seconds(instruction: Instruction) -> float:
            return max(compiler_seconds(program, instruction, roofs) or 0.0, 50e-9)

        return build_xspace(program, device_kind, seconds, n_steps, serialise_program(program))

    def count(data: bytes) -> int:
        space = new_message("XSpace")
        space.ParseFromString(data)
        return sum(len(line.events) for plane in space.planes for line in plane.lines)

    per_step = count(built(1))
    data = built(-(-n_events // per_step))
    path.write_bytes(data)
    return count(data)


def parse_and_measure(path: Path) -> dict[str, Any]:
    """Time and memory of this process for reading a trace and breaking it down, including the imports."""
    start_wall, start_cpu = time.perf_counter(), time.process_time()
    from tomat.perf.profile.trace import load_trace
    from tomat.perf.profile.trace_breakdown import breakdown_from_trace

    trace = load_trace(path)
    kept = [
        len(one) for device in trace.devices for one in (device.ops, device.async_ops, device.modules, device.steps)
    ]
    breakdown = breakdown_from_trace(trace)
    return {
        "wall_seconds": time.perf_counter() - start_wall,
        "cpu_seconds": time.process_time() - start_cpu,
        "peak_memory_bytes": peak_memory_bytes(),
        "events_parsed": sum(kept),
        "operations": len(breakdown.ops),
        "step_seconds": breakdown.step_seconds,
    }


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
