"""`train_tomat_tpu.py`: `tomat train`, with the words as they are."""

import runpy
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "train_tomat_tpu.py"


def test_the_words_reach_the_verb(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("run_name: teacher\n")
    for more, says in (
        (["--quantised", str(tmp_path / "none")], "none has no config.yaml; give a folder"),
        ([], "needs --teacher RUN and --quantised DIR"),
    ):
        monkeypatch.setattr(sys, "argv", [str(LAUNCHER), "--teacher", str(tmp_path), *more])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(LAUNCHER), run_name="__main__")
        assert left.value.code == 2 and says in " ".join(capsys.readouterr().err.split())
