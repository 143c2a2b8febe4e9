import pytest

from tomat.base.errors import TomatError
from tomat.base.overrides import parse_overrides, read_yaml


@pytest.mark.parametrize(
    ("content", "words"), [("a: [", "a.yaml is not YAML"), ("- 1", "list"), (None, r"a.yaml does not exist\.$")]
)
def test_a_file_that_cannot_be_read_is_not_said_to_be_no_yaml(tmp_path, content, words):
    with pytest.raises(TomatError, match=r"config file .* cannot be read: Is a directory\.$"):
        read_yaml(tmp_path)
    if content is not None:
        (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(TomatError, match=words):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", ["1e-4", "1e3", "007", "yes", "12e4567", "2026-11-30", "1_0"])
def test_a_name_is_the_word_that_was_given(name):
    assert parse_overrides(["--run_name", name, f"--data.train={name}", "--a.b", name])["run_name"] == name


def test_other_values_are_read_as_yaml_and_a_quoted_name_loses_its_quotes():
    words = ["--run_name", '"1e-4"', "--a.b", "1e-4", "--a.c", "yes", "--data.train", "null", "--baseline=5"]
    expected = {"run_name": "1e-4", "a": {"b": 1e-4, "c": True}, "data": {"train": None}, "baseline": "5"}
    assert parse_overrides(words) == expected
