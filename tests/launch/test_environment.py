"""Secrets reach the hosts in a file, and nothing else."""

import subprocess

import pytest

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.launch.environment import check_env_file

SECRET = "s3cr3t-of-the-test"


def env_file(folder, text: str, mode: int = 0o600):
    path = folder / "train.env"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_names_are_read_and_values_are_not_told(tmp_path):
    path = env_file(tmp_path, f"# of W&B\nexport WANDB_API_KEY={SECRET}\n\nMODE='a b $x'\n")
    assert check_env_file(path) == ["WANDB_API_KEY", "MODE"]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (f"A={SECRET}", 0o640, "mode 640.*chmod 600"),
        (f"A={SECRET}\n{SECRET}", 0o600, "line 2 is no variable"),
        (f"A={SECRET} B", 0o600, "line 1 is no variable"),
        (f"A='{SECRET}", 0o600, "line 1 is no variable"),
        (f"1A={SECRET}", 0o600, "line 1 is no variable"),
        (f'A="$(rm {SECRET})"', 0o600, "line 1 .A. has a character that a shell acts on"),
        (f"A={SECRET};reboot", 0o600, "a shell acts on"),
    ],
)
def test_what_a_shell_would_do_more_with_is_refused(tmp_path, text, mode, message):
    with pytest.raises(TomatError, match=message) as refused:
        check_env_file(env_file(tmp_path, text, mode))
    assert SECRET not in str(refused.value)


def test_a_file_in_git_is_refused(world):
    path = env_file(world.checkout, f"A={SECRET}")
    subprocess.run(["git", "add", path.name], check=True)
    with pytest.raises(TomatError, match="is in git"):
        check_env_file(path)


def test_the_training_has_the_variables_and_nobody_else(world, capfd):
    env_file(world.checkout, f"A_SECRET={SECRET}\n")
    words = ["launch", "--config_path", "run.yaml", "--zone", "us-east5-b", "--slice", "v6e-4", "--poll_seconds", "0.3"]
    words += ["--env_file", "train.env"]
    world.behave(0)
    assert main(words) == 0
    assert main([*words, "--execute", "--keep", "--json", "figures.json"]) == 0
    assert (world.folder / "secret-host-0").read_text() == SECRET
    sent = next((world.folder / "machines").glob("*/host-0/tomat-launch/env"))
    assert sent.stat().st_mode & 0o777 == 0o600 and sent.parent.stat().st_mode & 0o777 == 0o700
    told = capfd.readouterr()
    assert "by name: A_SECRET" in told.out and SECRET not in told.out + told.err
    holders = [
        path for path in world.folder.parent.rglob("*") if path.is_file() and SECRET in path.read_text("latin-1")
    ]
    assert sorted(path.name for path in holders) == ["env", "secret-host-0", "train.env"]
