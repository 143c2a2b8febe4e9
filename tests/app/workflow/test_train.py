"""What the end of a training says of itself."""

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tomat.app.cli import main
from tomat.app.workflow.train import loss_change, write_profile_page
from tomat.train.settings.config import config_from_dict

PROFILE = Path(__file__).parents[2] / "fixtures" / "profiles" / "cpu_step.xplane.pb.gz"


def test_a_loss_that_rose_is_not_called_lower():
    assert loss_change(5.0, 2.5) == " (2.0 times lower)"
    assert loss_change(2.5376, 2.5658) == " (1.1 % higher)" and loss_change(2.5658, 2.5376) == " (1.1 % lower)"
    assert loss_change(2.5, 2.5) == loss_change(math.nan, 2.5) == loss_change(2.5, 0.0) == ""


def test_a_model_whose_flops_are_not_known_has_a_page_without_mfu(tmp_path, capsys):
    """The run is whole by then: it must not end with an error."""
    folder = tmp_path / "profiler" / "plugins" / "profile" / "2026"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(gzip.decompress(PROFILE.read_bytes()))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "step_seconds": 1.0, "wall_seconds": 1.0}) + "\n")
    mixture = {"type": "mixtral", "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    data = {"source": "embedded", "n_density_tokens": 64}
    of_run = {"slice": "v6e-4", "tracking_dir": str(tmp_path / "docs")}
    config = config_from_dict({"model": mixture, "data": data, **of_run})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    result: Any = SimpleNamespace(run_dir=tmp_path)
    page = write_profile_page(config, result)
    said = " ".join(capsys.readouterr().out.split())
    assert "has no MFU: FLOPs of MixtralConfig are not known" in said
    assert page is not None and "No step time is on record" in page.read_text()
    # The verb that writes the page again asks for them too.
    assert main(["profile", str(tmp_path), "--docs", str(tmp_path / "docs")]) == 0
    assert "has no MFU: FLOPs of MixtralConfig are not known" in " ".join(capsys.readouterr().out.split())
