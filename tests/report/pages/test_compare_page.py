"""The page of a comparison."""

from tomat.report.pages.compare_page import PARTS, sparkline, sparklines, write_comparison_page
from tomat.train.runs.compare import Comparison, RunView


def view(name: str, losses: dict[int, float]) -> RunView:
    parts = dict.fromkeys((part for part, _ in PARTS), 1.0) | {"wall": 5.0}
    return RunView(name, f"runs/{name}", {"last_loss": 2.0}, parts, losses, {2: 3.0})


def comparison(reasons: tuple[str, ...] = (), windows: bool = True) -> Comparison:
    a, b = view("a", {1: 4.0, 2: 2.0}), view("b", {1: 5.0, 2: 2.5})
    found = ((1, 1, (4.0, 5.0)), (2, 2, (2.0, 2.5))) if windows else ()
    return Comparison((a, b), {"x.y": (None, 3)}, reasons, (1, 2) if windows else (), found)


def test_the_page_has_every_part(tmp_path):
    page = write_comparison_page(comparison(), tmp_path / "new" / "ab.md")
    text = page.read_text()
    for words in ("| `x.y` | – | 3 |", "| 1 to 1 | 4.0000 | 5.0000 (+1.0000) |", "their losses can be compared",
                  "| steps, from loss to loss | 1.0 (20.0 %) |", "![Losses by step](ab.svg)"):  # fmt: skip
        assert words in text
    assert (page.parent / "ab.svg").read_text().lstrip().startswith("<?xml")


def test_what_cannot_be_compared_is_said_first(tmp_path):
    text = write_comparison_page(comparison(("other bins",), windows=False), tmp_path / "ab.md").read_text()
    assert "Their losses cannot be compared;" in text and "- other bins" in text
    assert "No step has a loss in every run (a: steps 1 to 2; b: steps 1 to 2)." in text
    assert sparklines(comparison(windows=False)) == []


def test_losses_below_a_hundredth_are_told_apart(tmp_path):
    a, b = view("a", {1: 0.00612}), view("b", {1: 0.00608})
    found = Comparison((a, b), {}, (), (1,), ((1, 1, (0.00612, 0.00608)),))
    assert "| 1 to 1 | 0.00612 | 0.00608 (-4e-05) |" in write_comparison_page(found, tmp_path / "ab.md").read_text()


def test_bars_go_from_the_lowest_to_the_highest():
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0) == "▁▅█"
    assert [line for _, line in sparklines(comparison())] == ["▆▁", "█▂"]
