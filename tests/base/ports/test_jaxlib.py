"""XLA's parser of HLO text is where it was: of another version of jaxlib, look at it again."""

import importlib.metadata

from tomat.base.ports.jaxlib import VERSION, parse_hlo_text

TEXT = "HloModule m\n\nENTRY e {\n  ROOT a = f32[4]{0} parameter(0)\n}\n"


def test_the_version_is_the_one_that_this_was_written_for():
    assert importlib.metadata.version("jaxlib") == VERSION


def test_text_becomes_a_module_or_a_reason():
    done = parse_hlo_text(TEXT, 60.0)
    assert done.returncode == 0 and b"parameter" in done.stdout
    done = parse_hlo_text(TEXT.replace("parameter", "nothing"), 60.0)
    assert done.returncode == 1 and done.stderr
