"""A run continues only as the run it was."""

from pathlib import Path

import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem

from tomat.base.errors import TomatError
from tomat.train.origins import refuse_changes
from tomat.train.settings.config import load_config

DEMO = Path(__file__).parents[2] / "configs" / "train" / "demo.yaml"


@pytest.fixture
def recorded(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(load_config(DEMO).to_dict()))
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    return path


def test_the_same_configuration_continues(recorded):
    refuse_changes(recorded, load_config(DEMO))
    refuse_changes(recorded, load_config(DEMO, ["--sharding", "fsdp", "--model.gradient_checkpointing", "false"]))
    with pytest.raises(TomatError, match=r"optimizer\.warmup"):
        refuse_changes(recorded, load_config(DEMO, ["--optimizer.warmup", "7"]))


@pytest.mark.parametrize(
    "content, said",
    [
        (None, r"has checkpoints, but config\.yaml .* is missing.*copy.*run_name"),
        (b"  \n", r"has checkpoints, but config\.yaml .* is empty.*copy.*run_name"),
        (b"- a\n- b\n", "holds no settings"),
        (b"!!bool x", "is not YAML .* Restore it or use another run_name"),
        (b"[" * 5000, "is not YAML"),
        (b"\xff\xfe\xff", "is not YAML"),
    ],
)
def test_checkpoints_without_a_configuration_are_not_continued(recorded, content, said):
    recorded.unlink()
    if content is not None:
        recorded.write_bytes(content)
    with pytest.raises(TomatError, match=said):
        refuse_changes(recorded, load_config(DEMO))


def test_a_place_that_cannot_be_listed_is_one_error(recorded, monkeypatch):
    def refuse(self: object, path: str, **_: object) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    with pytest.raises(TomatError, match=f"{recorded.parent}/checkpoints cannot be read: .*Give this user the right"):
        refuse_changes(recorded, load_config(DEMO))


def test_checkpoints_that_lie_elsewhere_count_and_without_any_there_is_nothing_to_continue(recorded, tmp_path):
    (recorded.parent / "checkpoints" / "step-3").rmdir()
    refuse_changes(recorded, load_config(DEMO, ["--loss.kind", "crps"]))
    (tmp_path / "temporary" / "demo" / "step-5").mkdir(parents=True)
    words = ["--trainer.checkpointer.temporary_base_path", str(tmp_path / "temporary")]
    with pytest.raises(TomatError, match="loss.kind"):
        refuse_changes(recorded, load_config(DEMO, [*words, "--loss.kind", "crps"]))
