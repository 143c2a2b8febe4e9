"""`train_tomat_tpu.py`: `tomat train`, with the words as they are."""

import runpy
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "train_tomat_tpu.py"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--teacher", "{run}", "--quantised", "{run}/none"],
            "none has no config.yaml; give a folder",
        ),
        (["--teacher", "{run}"], "needs --teacher RUN and --quantised DIR"),
        (["--config_path", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--trainer.num_train_stepz", "3"], "did you mean trainer.num_train_steps?"),
    ],
)
def test_the_words_reach_the_verb(words, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("run_name: teacher\n")
    monkeypatch.setattr(sys, "argv", [str(LAUNCHER), *(word.format(run=tmp_path) for word in words)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(LAUNCHER), run_name="__main__")
    assert left.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
