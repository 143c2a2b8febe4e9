import pytest

from tomat.base.errors import TomatError
from tomat.base.overrides import read_yaml


def test_a_file_that_cannot_be_read_is_not_said_to_be_no_yaml(tmp_path):
    with pytest.raises(TomatError, match=r"config file .* cannot be read: Is a directory\.$"):
        read_yaml(tmp_path)
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(TomatError, match="a.yaml is not YAML"):
        read_yaml(tmp_path / "a.yaml")
    with pytest.raises(TomatError, match="does not exist"):
        read_yaml(tmp_path / "b.yaml")
    (tmp_path / "a.yaml").write_text("- 1")
    with pytest.raises(TomatError, match="list"):
        read_yaml(tmp_path / "a.yaml")
