"""A second libtpu for tests of which one compiles."""

import importlib.util
from pathlib import Path


def another_libtpu(folder: Path) -> Path:
    """The installed libtpu, under another version, in a folder that is made."""
    facts = folder / "libtpu-0.0.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n")
    (folder / "libtpu").mkdir()
    found = importlib.util.find_spec("libtpu")
    assert found is not None and found.origin is not None
    (folder / "libtpu" / "libtpu.so").symlink_to(Path(found.origin).with_name("libtpu.so"))
    return folder
