"""Lists the packages that a training step needs besides JAX, for a machine with a GPU and no network.

It imports what `tomat lab run`, `beside_levanter.py` and the figures of a page import, and reads a recipe, because a
model's name makes Levanter import all of its models. It prints each imported package with its version, except those of
the other machine (from `pip list --format freeze` there, or names, one a line). `pip download --no-deps -r FILE`
fetches them; there `pip install --no-index --no-deps --target DIR` unpacks them.
"""

import argparse
import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

from tomat.base.arguments import existing_file
from tomat.train.settings.config import load_config

IMPORTED = (
    "tomat.measure.lab.session",
    "tomat.report.pages.sweep_pages",
    "tomat.perf.profile.load",
    "matplotlib.pyplot",
)
IMPORTED += ("beside_levanter",)
RECIPE = Path(__file__).parents[1] / "configs" / "train" / "200m-h100-fast.yaml"
LATER = ("zarr", "numcodecs", "donfig", "nvidia-ml-py")
"""Packages that are imported only when shards are written or read, or when a GPU's energy is read."""
OF_JAX = re.compile(r"jax(lib)?|jax-(cuda|rocm).*|libtpu|nvidia-(?!ml-py).*|tomat")


def canonical(name: str) -> str:
    """A package's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def needed(there: set[str]) -> list[str]:
    """`name==version` of every imported package, sorted, without JAX's and those in `there`."""
    for module in IMPORTED:
        importlib.import_module(module)
    load_config(RECIPE)
    packages = importlib.metadata.packages_distributions()
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    names = {canonical(one) for top in tops for one in packages.get(top, ())} | set(LATER)
    wanted = sorted(name for name in names - there if not OF_JAX.fullmatch(name))
    return [f"{name}=={importlib.metadata.version(name)}" for name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the packages that a training step needs beside JAX.")
    parser.add_argument("--there", type=existing_file, metavar="FILE", help="packages that the other machine has")
    args = parser.parse_args()
    lines = args.there.read_text(encoding="utf-8").splitlines() if args.there else []
    there = {canonical(line.split("==")[0]) for line in lines if line.strip()}
    print("\n".join(needed(there)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
