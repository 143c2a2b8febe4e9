"""A7: a checkpoint whose data were damaged after the save is not taken for whole."""

import datetime
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from levanter.checkpoint import CheckpointerConfig

from tomat.base.errors import TomatError
from tomat.train.checkpointer import RunCheckpointer
from tomat.train.runs.checkpoints import find_checkpoint

FLIPS = 60
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """`step-7` as a run saves it: 400 kB of normal numbers in five arrays."""
    run = tmp_path_factory.mktemp("run")
    config = CheckpointerConfig(
        base_path=str(run / "checkpoints"),
        save_interval=datetime.timedelta(days=1),
        append_run_id_to_base_path=False,
    )
    draw = np.random.default_rng(0).normal
    model = {f"w{i}": jnp.asarray(draw(size=(128, 160)), jnp.float32) for i in range(5)}
    checkpointer = RunCheckpointer(config, "run")
    checkpointer.on_step(tree={"step": jnp.array(7), "model": model}, step=7, force=True)
    checkpointer.wait_until_finished()
    return run / "checkpoints" / "step-7"


def data_files(checkpoint: Path) -> list[Path]:
    """Everything that the training's state lies in."""
    json_files = [path.name for path in checkpoint.glob("*.json")]
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name not in json_files)


def recognised(checkpoint: Path) -> str:
    """Why it is refused; empty where it would be loaded."""
    try:
        find_checkpoint(str(checkpoint))
    except TomatError as error:
        return str(error)
    return ""


def test_random_bit_flips(saved, tmp_path, figure):
    """One bit of all data files, drawn evenly over their bits, 60 times."""
    files = data_files(saved)
    sizes = np.array([path.stat().st_size for path in files])
    random = np.random.default_rng(7)
    found = 0
    for _ in range(FLIPS):
        copy = tmp_path / "step-7"
        shutil.copytree(saved, copy)
        index = int(random.choice(len(files), p=sizes / sizes.sum()))
        target = copy / files[index].relative_to(saved)
        content = bytearray(target.read_bytes())
        content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
        target.write_bytes(content)
        found += bool(recognised(copy))
        shutil.rmtree(copy)
    figure("A7", f"of {FLIPS} random bit flips in a checkpoint's data, recognised", found)
    assert found == FLIPS


def zeroed(saved: Path, copy: Path, target: Path, start: int, stop: int) -> str:
    """Why the checkpoint is refused with `target` zero from `start` to `stop`; empty where it would be loaded."""
    shutil.copytree(saved, copy)
    harmed = copy / target.relative_to(saved)
    content = bytearray(harmed.read_bytes())
    content[start:stop] = bytes(stop - start)
    harmed.write_bytes(content)
    reason = recognised(copy)
    shutil.rmtree(copy)
    return reason


def test_pages_of_zeros(saved, tmp_path, figure):
    """What a loss of power leaves: each page of each data file in turn."""
    pages = [
        (path, start)
        for path in data_files(saved)
        for start in range(0, path.stat().st_size - PAGE_BYTES + 1, PAGE_BYTES)
    ]
    assert pages
    found = [bool(zeroed(saved, tmp_path / "step-7", p, start, start + PAGE_BYTES)) for p, start in pages]
    figure("A7", "pages of zeros in a checkpoint's data, recognised", f"{sum(found)} of {len(found)}")
    assert all(found)


def test_files_of_zeros(saved, tmp_path, figure):
    """The same, each data file in turn."""
    files = data_files(saved)
    found = [bool(zeroed(saved, tmp_path / "step-7", p, 0, p.stat().st_size)) for p in files]
    figure("A7", "files of zeros in a checkpoint's data, recognised", f"{sum(found)} of {len(found)}")
    assert all(found)


def test_what_is_not_damaged_is_whole(saved, figure):
    figure("A7", "an undamaged checkpoint, taken for whole", not recognised(saved))
    assert not recognised(saved)
    assert json.loads((saved / "metadata.json").read_text())["step"] == 7
