"""Compares the memory of the blocked loss with that of the plain formulas."""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from plain_loss import plain_loss

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.report.terminal import show
from tomat.base.reporting import write_report
from tomat.data.tokens.vocabulary import Vocabulary
from tomat.model.devices import ignore_absent_tpu
from tomat.model.loss.config import LOSS_KINDS, LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget


def build_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(
        prog="python profiling/loss_memory.py",
        description="Compile value and gradient of the loss for this machine's JAX backend, without running them, and "
        "report the temporary memory of the blocked loss and of the plain formulas.",
    )
    add_flag(parser, "--kind", "emd", "the formula", choices=LOSS_KINDS)
    add_flag(parser, "--batch", 8, "sequences on one device", type=positive_int)
    add_flag(parser, "--positions", 8192, "tokens per sequence", type=positive_int)
    add_flag(parser, "--hidden_dim", 1024, "width of the model", type=positive_int)
    add_flag(parser, "--density_tokens", 16384, "density bins", type=positive_int)
    add_flag(parser, "--dtype", "bfloat16", "compute type", choices=["bfloat16", "float32"])
    add_flag(parser, "--block_positions", LossConfig().block_positions, "positions of a block", type=positive_int)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --kind emd --batch 1 --positions 512 --density_tokens 1024",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compile value and gradient of the plain and the blocked loss and report their temporary memory. Runs nothing."""
    ignore_absent_tpu()
    config = LossConfig(kind=args.kind, block_positions=args.block_positions)
    dtype = jnp.dtype(args.dtype)
    arrays = (
        jax.ShapeDtypeStruct((args.batch, args.positions, args.hidden_dim), dtype),
        jax.ShapeDtypeStruct((Vocabulary(args.density_tokens).size, args.hidden_dim), dtype),
        jax.ShapeDtypeStruct((args.batch, args.positions), jnp.int32),
    )
    # The values of the bins do not affect the memory.
    target = DensityTarget(args.density_tokens, np.linspace(0.0, 1.0, args.density_tokens))

    def compiled_memory(loss):
        # Without the metrics, which take more memory with the plain formulas than with blocks.
        of = jax.value_and_grad(lambda *inputs: loss(*inputs, config=config, target=target)[0], argnums=(0, 1))
        memory = jax.jit(of).lower(*arrays).compile().memory_analysis()
        if memory is None:
            raise TomatError(f"JAX's {jax.default_backend()} backend does not report compiled memory; try another one.")
        return memory

    memory = compiled_memory(density_loss)
    plain, blocked = compiled_memory(plain_loss).temp_size_in_bytes, memory.temp_size_in_bytes
    show(
        f"{args.kind}, value and gradient, {args.batch} x {args.positions} positions, width {args.hidden_dim}, "
        f"{args.density_tokens} bins, {args.dtype}, compiled for {jax.default_backend()}:\n"
        f"  plain formulas          {plain / 2**30:8.2f} GiB of temporaries\n"
        f"  blocks of {args.block_positions:4d} positions {blocked / 2**30:8.2f} GiB, {plain / blocked:.1f} times less"
    )
    report = {
        "batch": args.batch,
        "positions": args.positions,
        "hidden_dim": args.hidden_dim,
        "n_density_tokens": args.density_tokens,
        "kind": args.kind,
        "block_positions": args.block_positions,
        "dtype": args.dtype,
        "platform": jax.default_backend(),
        "arguments_bytes": memory.argument_size_in_bytes,
        "plain_temp_bytes": plain,
        "blocked_temp_bytes": blocked,
    }
    write_report(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
