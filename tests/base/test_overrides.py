import pytest

from tomat.base.errors import TomatError
from tomat.base.overrides import read_yaml


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
