"""The types of numbers and files on a command line."""

import pytest

from tomat.base import arguments
from tomat.base.errors import TomatError


def parse(kind, word: str):
    parser = arguments.Parser(prog="test")
    parser.add_argument("--value", type=kind)
    return parser.parse_args([f"--value={word}"]).value


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("positive_int", ["1", "1_000"], ["0", "-3", "1.5", "nan", "1e400", "9" * 5000, "", "x"]),
        ("count", ["0", "7"], ["-1", "0.0", "inf", str(2**60)]),
        ("whole_number", ["-3", "0"], ["1e3", "nan"]),
        ("positive_float", ["1e-9", "3"], ["0", "-1", "nan", "inf", "-inf", "1e999", "two"]),
        ("share", ["0", "1", "0.5"], ["1.01", "-0.1", "nan"]),
        ("percent", ["0", "250"], ["-1", "nan", "inf"]),
    ],
)
def test_numbers(name, taken, refused):
    kind = getattr(arguments, name)
    assert [parse(kind, word) for word in taken] == [float(word) for word in taken]
    for word in refused:
        with pytest.raises(TomatError, match=f"--value: found '{word[:20]}"):
            parse(kind, word)


def test_dates():
    assert parse(arguments.iso_date, "2026-01-02") == "2026-01-02"
    for word in ("2026-13-45", "20260102", "2026-W01-1", "2 January 2026", ""):
        with pytest.raises(TomatError, match=f"--value: found '{word}', expected a date"):
            parse(arguments.iso_date, word)


def test_places_to_write(tmp_path):
    assert parse(arguments.output_file, str(tmp_path / "new" / "folder" / "x.json"))
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "x.json"):
        with pytest.raises(TomatError, match="folder"):
            parse(arguments.output_file, str(place))
    assert parse(arguments.report_file, "-") == arguments.STANDARD_OUTPUT


def test_places_to_read(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    assert parse(arguments.run_folder, str(tmp_path)) == tmp_path
    files = [(arguments.existing_file, place) for place in (tmp_path, tmp_path / "none", "n" * 5000)]
    files.append((arguments.config_file("configs/train/"), tmp_path / "none"))
    for kind, place in (*files, (arguments.run_folder, tmp_path / "config.yaml")):
        with pytest.raises(TomatError, match="`test --help` says"):
            parse(kind, str(place))


def test_a_flag_is_never_abbreviated():
    parser = arguments.Parser(prog="test")
    parser.add_argument("--fork_step", type=int)
    parser.set_defaults(takes_overrides=True)
    assert parser.parse_known_args(["--fork", "3"])[1] == ["--fork", "3"]
