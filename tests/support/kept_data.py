"""Cuts of codecs, fits to the embedded densities and sets of them are made once in a run of the tests: most ask for the
same."""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from inspect import signature, unwrap
from pathlib import Path
from typing import Any

import numpy as np

from tomat.data.codec import quantiser, ratios
from tomat.data.codec.quantiser import FineBins, optimal_cuts
from tomat.data.tokens import demo
from tomat.data.tokens.pipeline.driver import write_shards


def keep_data() -> None:
    """This process takes what another one of the run has made by the same program."""
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).with_name("data")
    program = Path(quantiser.__file__).read_bytes()

    def kept_cuts(fine: FineBins, n: int, absolute: bool) -> tuple[np.ndarray, int]:
        digest = hashlib.sha256(repr((n, absolute)).encode())
        for each in (program, fine.bins, fine.counts, fine.sums):
            digest.update(each)
        path = folder / f"{digest.hexdigest()}.npz"
        if not path.exists():
            cuts, passes = optimal_cuts(fine, n, absolute)
            part = path.with_suffix(f".{os.getpid()}.npz")
            np.savez(part, cuts=cuts, passes=passes)
            part.replace(path)
        with np.load(path) as found:
            return found["cuts"], int(found["passes"])

    def kept_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def found(*asked: Any) -> Any:
            of = signature(fit).bind(*asked).arguments
            materials = demo.demo_materials("train", of["groups"], of.get("left_out", ()))
            path = folder / hashlib.sha256(repr((unwrap(fit).__name__, asked, materials)).encode()).hexdigest()
            if not path.exists():
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(pickle.dumps(unwrap(fit)(*asked)))
                part.replace(path)
            return pickle.loads(path.read_bytes())

        return found

    def kept_set(place: Path, names: list[str], load: Any, **settings: Any) -> None:
        if place.exists():  # to be gone on with
            write_shards(place, names, load, **settings)
            return
        asked = settings | {name: settings[name].sha256 for name in ("codec", "promolecule")}
        held = folder / hashlib.sha256(repr((names, load.__name__, sorted(asked.items()))).encode()).hexdigest()
        if not held.exists():
            part = held.with_suffix(f".{os.getpid()}")
            write_shards(part, names, load, **settings)
            try:
                part.rename(held)
            except OSError:  # another process was first
                shutil.rmtree(part)
        shutil.copytree(held, place)

    folder.mkdir(parents=True, exist_ok=True)
    quantiser.optimal_cuts = ratios.optimal_cuts = kept_cuts
    demo.fit_demo_codec, demo.fit_demo_promolecule = kept_fit(demo.fit_demo_codec), kept_fit(demo.fit_demo_promolecule)
    demo.write_shards = kept_set
