"""Secrets reach the hosts in a file, and nothing else."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.launch.environment import main as write_anew
from tomat.launch.environment import read_env_file, shell_text

SECRET = "s3cr3t-of-the-test"


def env_file(folder, text: str, mode: int = 0o600):
    path = folder / "train.env"
    path.write_text(text, errors="surrogateescape")
    path.chmod(mode)
    return path


# Line by line as files of secrets are written, and what the training is to find.
READ = [
    ("export A='a b $x'", "a b $x"),
    ("A=b", "b"),
    ("A=", ""),
    ("  export\tA='b c' # which is", "b c"),
    ("A=b#c", "b#c"),
    ("A='it'\"$\"'s'", None),
    ('A="it\'s"', "it's"),
    ("A=it\\'s", "it's"),
    ("A='a'\"b\"c", "abc"),
    ('A="a \\"b\\" \\\\ \\$HOME \\`x\\` \\n"', 'a "b" \\ $HOME `x` \\n'),
    ("A=\"it'$(touch ran)'s\"", None),
    ("A=\"it'`touch ran`'s\"", None),
    ("A='$(touch ran)'", "$(touch ran)"),
    ("A=$HOME", None),
    ("A=a\u2028b\x85c", "a\u2028b\x85c"),
    ("A='a\u2028b'", "a\u2028b"),
    ("A=b\r", "b"),
    ("A='b'\r", "b"),
    ("A=a\rb", None),
    ("A='\0'", None),
    ("A='\x1b[1m'", None),
    ("A=b c", None),
    ("A='b", None),
    ("A=b\\", None),
    ("A =b", None),
    ("\u00c9=b", None),
    ("A[0]=b", None),
    ("A=b\nA=c", None),
]


@pytest.mark.parametrize(("line", "value"), READ)
def test_the_training_gets_what_the_line_says_or_nothing_is_sent(tmp_path, line, value):
    """As a shell reads the file that is written anew: nothing in it is run."""
    source, target = tmp_path / "train.env", tmp_path / "env"
    source.write_bytes(f"# a\n\n{line}\nZ=last".encode())
    source.chmod(0o600)
    if value is None:
        with pytest.raises(TomatError, match="line [34]") as refused:
            read_env_file(source)
        assert "touch ran" not in str(refused.value)
        assert write_anew([str(source), str(target)]) == 2 and not target.exists()
        return
    assert read_env_file(source) == {"A": value, "Z": "last"}
    assert write_anew([str(source), str(target)]) == 0 and target.stat().st_mode & 0o777 == 0o600
    script = 'set -a; . ./env; set +a; printf \'%s|%s\' "$A" "$Z"'
    said = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert (said.stdout.decode(), said.stderr) == (f"{value}|last", b"") and not (tmp_path / "ran").exists()


@given(st.dictionaries(st.sampled_from("ABC_"), st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))))
@settings(max_examples=100, deadline=None)
def test_what_is_written_anew_says_the_same(variables):
    with tempfile.TemporaryDirectory() as folder:
        path = env_file(Path(folder), shell_text(variables))
        assert read_env_file(path) == variables


def test_a_file_that_others_may_read_and_one_that_is_no_text_are_refused_without_what_they_hold(tmp_path):
    for text, mode, message in (
        (f"A={SECRET}", 0o640, "mode 640.*chmod 600"),
        (f"A=b\nB={SECRET}\udcff", 0o600, "line 2 is not UTF-8"),
    ):
        with pytest.raises(TomatError, match=message) as refused:
            read_env_file(env_file(tmp_path, text, mode))
        assert SECRET not in str(refused.value)


def test_a_file_in_git_is_refused(world):
    path = env_file(world.checkout, f"A={SECRET}")
    subprocess.run(["git", "add", path.name], check=True)
    with pytest.raises(TomatError, match="is in git"):
        read_env_file(path)


def test_the_training_has_the_variables_and_nobody_else(world, capfd):
    env_file(world.checkout, f"A_SECRET={SECRET}\n")
    words = ["launch", "--config_path", "run.yaml", "--zone", "us-east5-b", "--slice", "v6e-4", "--poll_seconds", "0.1"]
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
