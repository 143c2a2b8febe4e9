"""`tomat bench loss`: the memory that the blocked loss needs, against the plain formulas."""

import argparse
from typing import Any

from tomat.base.arguments import positive_int, report_file
from tomat.base.errors import TomatError
from tomat.loss.config import LOSS_KINDS, LossConfig

GIB = 2.0**30


def register_bench(subparsers: argparse._SubParsersAction) -> None:
    """Add `loss` to the verbs of `tomat bench`."""
    parser = subparsers.add_parser(
        "loss",
        help="compiled memory of the blocked loss against the plain formulas",
        description="Compile value and gradient of the loss for this machine's JAX backend, without running them, and "
        "report the temporary memory of the blocked loss and of the plain formulas.",
    )
    add_shape(parser, "emd")
    parser.add_argument(
        "--block_positions",
        type=positive_int,
        default=LossConfig().block_positions,
        help="positions of a block (default: 256)",
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run)


def add_shape(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add what decides the arrays of a loss and its formula, which is `kind` by default."""
    parser.add_argument("--kind", default=kind, choices=LOSS_KINDS, help="the formula (default: %(default)s)")
    parser.add_argument("--batch", type=positive_int, default=8, help="sequences on one device (default: 8)")
    parser.add_argument("--positions", type=positive_int, default=8192, help="tokens per sequence (default: 8192)")
    parser.add_argument("--hidden_dim", type=positive_int, default=1024, help="width of the model (default: 1024)")
    parser.add_argument("--density_tokens", type=positive_int, default=16384, help="density bins (default: 16384)")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="compute type (default: bfloat16)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the figures."""
    from tomat.base.reporting import console, write_report

    report = measure(
        LossConfig(kind=args.kind, block_positions=args.block_positions),
        batch=args.batch,
        positions=args.positions,
        hidden_dim=args.hidden_dim,
        n_density_tokens=args.density_tokens,
        dtype=args.dtype,
    )
    plain, blocked = report["plain_temp_bytes"], report["blocked_temp_bytes"]
    console.print(
        f"{args.kind}, value and gradient, {args.batch} x {args.positions} positions, width {args.hidden_dim}, "
        f"{args.density_tokens} bins, {args.dtype}, compiled for {report['platform']}:\n"
        f"  plain formulas          {plain / GIB:8.2f} GiB of temporaries\n"
        f"  blocks of {args.block_positions:4d} positions {blocked / GIB:8.2f} GiB, {plain / blocked:.1f} times less",
        soft_wrap=True,
    )
    write_report(args.json, report)
    return 0


def measure(
    config: LossConfig, *, batch: int, positions: int, hidden_dim: int, n_density_tokens: int, dtype: str
) -> dict[str, Any]:
    """Temporary memory of the compiled value and gradient, plain and blocked. Nothing is run.

    Args:
        config: The loss.
        batch: Sequences on one device.
        positions: Tokens per sequence.
        hidden_dim: Width of the model.
        n_density_tokens: Density bins; the values of the bins do not matter to the memory.
        dtype: Compute type, `bfloat16` or `float32`.

    Returns:
        The settings, `plain_temp_bytes`, `blocked_temp_bytes`, `arguments_bytes` and `platform`.

    Raises:
        TomatError: fewer than two density bins, or a backend that does not report memory.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tomat.loss.density_loss import density_loss, plain_loss
    from tomat.loss.target import DensityTarget
    from tomat.tokens.vocabulary import Vocabulary
    from tomat.training.devices import ignore_absent_tpu

    ignore_absent_tpu()
    arrays = (
        jax.ShapeDtypeStruct((batch, positions, hidden_dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((Vocabulary(n_density_tokens).size, hidden_dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((batch, positions), jnp.int32),
    )
    target = DensityTarget(n_density_tokens, np.linspace(0.0, 1.0, n_density_tokens))

    def compiled_memory(loss):
        # Without the metrics, which cost the plain formulas more than the blocks.
        of = jax.value_and_grad(lambda *inputs: loss(*inputs, config=config, target=target)[0], argnums=(0, 1))
        memory = jax.jit(of).lower(*arrays).compile().memory_analysis()
        if memory is None:
            raise TomatError(f"JAX's {jax.default_backend()} backend does not report compiled memory; try another one.")
        return memory

    plain, blocked = compiled_memory(plain_loss), compiled_memory(density_loss)
    return {
        "batch": batch,
        "positions": positions,
        "hidden_dim": hidden_dim,
        "n_density_tokens": n_density_tokens,
        "kind": config.kind,
        "block_positions": config.block_positions,
        "dtype": dtype,
        "platform": jax.default_backend(),
        "arguments_bytes": blocked.argument_size_in_bytes,
        "plain_temp_bytes": plain.temp_size_in_bytes,
        "blocked_temp_bytes": blocked.temp_size_in_bytes,
    }
