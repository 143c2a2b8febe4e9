"""Times the autoregressive decoder with and without its cache and with an 8-bit cache, and both decoders on a cell."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, config_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.report.terminal import show
from tomat.base.reporting import counted, write_report
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.ratios import fit_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.promolecule import PromoleculeFit
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START
from tomat.model.any_decoder import environment_of
from tomat.model.decoder import parameter_count
from tomat.model.devices import ignore_absent_tpu
from tomat.model.environment import EnvironmentTables
from tomat.predict.inference.autoregressive import CachedModel, decode_autoregressive, kept_bytes
from tomat.predict.inference.decoding import cell_patches
from tomat.predict.inference.interface import KvCacheDtype
from tomat.predict.inference.predictor import RunPredictor
from tomat.predict.inference.trained import LoadedRun
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import load_config

GOAL_WITH_CACHE = 20.0
"""Goal for tokens a second with the cache, relative to without."""


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        prog="python profiling/decode_speed.py",
        description="Tokens a second of the autoregressive decoder, with its cache and with a forward pass for each "
        "token, in turn, and the seconds that each of the two decoders takes for a cell. Weights are fresh: speed does "
        "not depend on them.",
    )
    text = "configuration of the model and its patches, with model.environment; a file or the name of one that ships"
    add_flag(parser, "--config_path", "demo-decoder", text, type=config_file("train"), metavar="FILE")
    add_flag(parser, "--batch", 1, "patches at a time, with the cache and without", type=positive_int)
    add_flag(parser, "--grid", 28, "voxels along each side of the cell that both decoders predict", type=positive_int)
    add_flag(parser, "--rounds", 5, "turns of each", type=positive_int)
    text = "decode beside it, in the same turns, with keys and values kept in this type"
    parser.add_argument("--kv_cache_dtype", choices=("int8",), help=text)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --config_path demo-decoder --batch 2 --grid 14 --rounds 1",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Time both comparisons in turn, print and write the figures."""
    ignore_absent_tpu()
    run, crystal = fresh_run(str(args.config_path))
    shape = (args.grid,) * 3
    config = run.config
    patches = cell_patches(run, crystal, shape)
    n_voxels, length = prod(patches.patch_shape), config.seq_len
    parameters = parameter_count(config.model_config(), config.data.model_vocabulary)
    show(
        f"{args.config_path}: {parameters / 1e6:.1f} M parameters, {length:,} positions, {n_voxels:,} voxels a patch, "
        f"on {jax.default_backend()}, {os.cpu_count()} cores; {counted(args.batch, 'patch', 'patches')} at a time."
    )
    rows = np.arange(args.batch, dtype=np.int32)
    # The first patches; repeated if there are fewer than the batch.
    batch = {name: array[rows % len(array)] for name, array in patches.arrays.items()}
    batch |= {"patch": rows, "sample": np.zeros_like(rows)}
    means = run.codec.decode(np.arange(run.codec.n_density_tokens), "mean")

    def with_cache(kv_cache_dtype: KvCacheDtype = "compute") -> np.ndarray:
        bins, _ = decode_autoregressive(
            run.model, batch, run.tables, means, n_voxels, "greedy", np.float32(1), np.uint32(0), None,
            config.trainer_config().mp, kv_cache_dtype,
        )  # fmt: skip
        return np.asarray(bins)

    def without_cache() -> np.ndarray:
        return np.asarray(decode_without_cache(run.model, batch, run.tables, n_voxels, len(means)))

    tokens = args.batch * n_voxels
    compact = [lambda: with_cache(args.kv_cache_dtype)] if args.kv_cache_dtype else []
    cached, plain, *kept = in_turn([with_cache, without_cache, *compact], args.rounds)
    figures: dict[str, Any] = {
        "config": str(args.config_path), "parameters": parameters, "positions": length, "batch": args.batch,
        "voxels": n_voxels, "platform": jax.default_backend(), "cores": os.cpu_count(), "rounds": args.rounds,
        "tokens_per_s_with_cache": spread_of([tokens / t for t in cached]),
        "tokens_per_s_without": spread_of([tokens / t for t in plain]),
        "times_with_cache": spread_of([slow / fast for fast, slow in zip(cached, plain, strict=True)]),
        "same_bins": float(np.mean(with_cache() == without_cache())),
    }  # fmt: skip
    show(
        f"tokens/s with the cache {said(figures['tokens_per_s_with_cache'])}, without "
        f"{said(figures['tokens_per_s_without'])}; times as many: {said(figures['times_with_cache'])} "
        f"(goal {GOAL_WITH_CACHE:.0f}); {figures['same_bins']:.2%} of the bins are the same"
    )
    for seconds in kept:
        bytes_of = [kept_bytes(config, args.batch, dtype) for dtype in ("compute", args.kv_cache_dtype)]
        figures |= {
            "kv_cache_dtype": args.kv_cache_dtype,
            "kv_cache_bytes": dict(zip(("compute", args.kv_cache_dtype), bytes_of, strict=True)),
            "tokens_per_s_with_kv_cache_dtype": spread_of([tokens / t for t in seconds]),
            "times_with_kv_cache_dtype": spread_of([whole / t for t, whole in zip(seconds, cached, strict=True)]),
            "same_bins_with_kv_cache_dtype": float(np.mean(with_cache() == with_cache(args.kv_cache_dtype))),
        }
        show(
            f"kv_cache_dtype {args.kv_cache_dtype}: {bytes_of[1]:,} bytes of keys and values for {bytes_of[0]:,}; "
            f"times as many tokens/s: {said(figures['times_with_kv_cache_dtype'])}; "
            f"{figures['same_bins_with_kv_cache_dtype']:.2%} of the bins are the same"
        )
    one, other = RunPredictor(run), RunPredictor(run, 1, "autoregressive")
    fast, slow = in_turn(
        [lambda: one.predict(crystal, shape, electrons=None), lambda: other.predict(crystal, shape, electrons=None)],
        args.rounds,
    )
    figures |= {
        "cell": crystal.name, "grid": list(shape), "cell_patches": len(patches.anchors),
        "parallel_seconds_per_cell": spread_of(fast), "autoregressive_seconds_per_cell": spread_of(slow),
        "times_faster_in_parallel": spread_of([b / a for a, b in zip(fast, slow, strict=True)]),
    }  # fmt: skip
    show(
        f"{crystal.name}, {counted(len(patches.anchors), 'patch', 'patches')}: parallel "
        f"{said(figures['parallel_seconds_per_cell'])} s, autoregressive "
        f"{said(figures['autoregressive_seconds_per_cell'])} s; times faster: "
        f"{said(figures['times_faster_in_parallel'])}"
    )
    write_report(args.json, figures)
    return 0


def fresh_run(config_path: str) -> tuple[LoadedRun, Crystal]:
    """An untrained run of the configuration, and a cell of the embedded densities."""
    config = load_config(config_path)
    if environment_of(config.model) is None:
        raise TomatError(f"{config_path} has no model.environment; this measures models that predict structures.")
    grid = load_demo(demo_materials("train")[0].material_id)
    histogram, fit = DensityHistogram(), PromoleculeFit()
    histogram.add(grid.rho)
    fit.add(grid)
    codec = fit_codec(histogram, config.data.n_density_tokens)
    model = eqx.filter_jit(model_initialiser(config, jax.random.PRNGKey(0)))()
    return LoadedRun(config, model, codec, fit.solve(), 0, "fresh"), Crystal.of(grid)


@eqx.filter_jit
def decode_without_cache(
    model: Any, batch: dict[str, Any], tables: EnvironmentTables | None, n_voxels: int, n_bins: int
) -> jax.Array:
    """Greedy bins, int32 [batch, voxel], with a forward pass over whole sequences for each voxel."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    cached = CachedModel.of(model, arrays, tables, n_bins)
    start = jnp.argmax(arrays["tokens"][0] == DENSITY_BLOCK_START).astype(jnp.int32)

    def step(tokens: jax.Array, voxel: jax.Array):
        bins = jnp.argmax(cached.logits_without_cache(tokens, start + voxel), axis=-1).astype(jnp.int32)
        column = (bins + DENSITY_START)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(tokens, column, start + voxel + 1, 1), bins

    return jax.lax.scan(step, arrays["tokens"], jnp.arange(n_voxels, dtype=jnp.int32))[1].T


def in_turn(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of each call in each round, one call after the other, after a first round that compiles."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, found in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                found.append(time.perf_counter() - started)
    return seconds


def spread_of(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}


def said(spread: dict[str, float]) -> str:
    """A spread in words; values from a thousand on as whole numbers."""
    middle, least, greatest = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        for value in (spread["median"], spread["min"], spread["max"])
    )
    return f"{middle} ({least} to {greatest})"


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
