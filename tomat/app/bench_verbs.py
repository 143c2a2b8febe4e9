"""`tomat bench`: measurements that need no accelerator. Each benchmark registers itself."""

import argparse
import importlib

BENCH_MODULES = (
    "tomat.bench.tokenise",
    "tomat.bench.loader",
    "tomat.bench.loss",
    "tomat.bench.preemption",
    "tomat.bench.profile",
    "tomat.bench.loss_tiles",
    "tomat.bench.numerics.bench",
)
"""Modules with `register_bench(subparsers)`; they import no more than argparse and the standard library."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `tomat bench`."""
    parser = subparsers.add_parser("bench", help="measure parts of tomat on this machine")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name in BENCH_MODULES:
        importlib.import_module(name).register_bench(benches)
