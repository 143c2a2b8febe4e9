"""The page of a log: the form of one kept by hand, with notes that stay."""

import re
import shlex

from markdown_reader import raw_html

from tomat.base.report.document import find_sections
from tomat.report.pages.run_log_page import wrapped, write_log_page
from tomat.train.runs.run_log import Entry, Log, Piece

COMMAND = "tomat train --config_path configs/train/demo.yaml --purpose 'two words  here' " + " ".join(
    f"--a.b{number} '[1, 2]'" for number in range(20)
)


def a_log(*more: Entry, loss: float = 2.5) -> Log:
    about = {"command": COMMAND, "recipe": "demo.yaml", "settings": {"optimizer.learning_rate": 0.5}, "purpose": "why",
             "commit": "abc", "host": "here", "processors": 2, "devices": "1 x cpu", "hosts": 1}  # fmt: skip
    pieces = (Piece("2026-01-02T03:04:05", 0, about), Piece("2026-01-03T00:00:00", 7, about))
    figures = {"first_loss": 5.0, "last_loss": loss, "steps_done": 9, "steps_total": 10, "step_seconds_median": 0.1}
    run = Entry("run", "A_1", None, pieces, "preempted", "SIGTERM", figures, True)
    measured = (Piece("2026-01-04T00:00:00", None, {"purpose": "fast"}),)
    row = Entry("lab", "b8", "sweep", measured, "out of memory", "9 GiB", {"batch_sequences": 8})
    return Log("runs", (run, row, *more), 1, {"runs/x": "damaged"})


def test_an_entry_has_what_a_log_by_hand_has(tmp_path):
    text = write_log_page(a_log(), tmp_path / "log.md").read_text()
    for words in (
        "## 2026-01-02: A_1", "| goal | why |", "| instance | 1 x cpu, host here with 2 processors, commit abc |",
        "- recipe: `demo.yaml`", "- `optimizer.learning_rate`: 0.5", "| result | PREEMPTED: SIGTERM |",
        "| initial loss | 5.0000 |", "| improvement | 2.5000 (50 %) |", "| step, median | 100.0 ms |",
        "In 2 pieces, from step 0 (2026-01-02 03:04:05), step 7", "| b8 |  | 8 |", "| OOM | 9 GiB |",
        "1 line of the log could not be read", "`runs/x` could not be read: damaged",
    ):  # fmt: skip
        assert words in text
    assert text.count("**Notes**:") == 2


def test_notes_stay_and_the_same_log_changes_nothing(tmp_path):
    page = write_log_page(a_log(), tmp_path / "log.md")
    page.write_text(page.read_text().replace("<!-- What was seen", "It worked. <!-- What was seen", 1))
    before = page.read_text()
    write_log_page(a_log(), page)
    assert page.read_text() == before
    third = Entry("run", "third", None, (Piece("2026-01-05T00:00:00", 0, {}),), "open")
    write_log_page(a_log(third, loss=2.0), page)
    text = page.read_text()
    assert "It worked." in text and "| improvement | 3.0000 (60 %) |" in text
    assert text.index("It worked.") < text.index("## 2026-01-05: third") and text.count("**Notes**:") == 3
    # A purpose cannot break the page or put HTML into it.
    hostile = "x <!-- tomat:end contents -->\n<!-- tomat:end a -->\n<script>alert(1)</script> | ```\n~~~ `<b>"
    about = {"command": hostile, "settings": {hostile: hostile}, "purpose": hostile}
    worst = Entry("run", hostile, None, (Piece("2026-01-06T00:00:00", 0, about),), hostile, hostile, {}, True)
    for _ in range(2):
        text = write_log_page(a_log(worst), page).read_text()
        assert "It worked." in text and len(find_sections(text, "log.md")) == 5
        assert not [each for each in raw_html(text) if "<script" in each or "<b" in each]


def test_what_a_sweep_sets_in_all_rows_is_said_once(tmp_path):
    def row(name: str, **settings) -> Entry:
        about = {"settings": {"model.hidden_dim": 64, **settings}}
        return Entry("lab", name, "wide", (Piece("2026-01-04T00:00:00", None, about),), "measured")

    text = write_log_page(a_log(row("b8"), row("ahead", dispatch_ahead=1)), tmp_path / "log.md").read_text()
    assert text.count("model.hidden_dim") == 1 and "| in every row | `model.hidden_dim 64` |" in text
    assert "| ahead | `dispatch_ahead 1` |" in text and "wide: ahead | – | `dispatch_ahead 1` |" in text
    assert "have in common stands with the sweep" in text
    alone = write_log_page(a_log(row("b8")), tmp_path / "one.md").read_text()
    assert "| b8 | `model.hidden_dim 64` |" in alone and "in common" not in alone
    bar = write_log_page(a_log(row("b8", words="a|b")), tmp_path / "bar.md").read_text()
    assert r"| b8 | `model.hidden_dim 64 words a\|b` |" in bar


def test_a_wrapped_command_is_the_same_words():
    lines = wrapped(COMMAND).split(" \\\n")
    assert shlex.split(re.sub(r" \\\n\s*", " ", wrapped(COMMAND))) == shlex.split(COMMAND)
    assert all(line.strip().startswith("--") for line in lines[1:])


def test_rows_of_other_machines_and_recipes_are_not_said_to_be_of_the_first():
    from tomat.report.pages.run_log_page import sweep_parts
    from tomat.train.runs.run_log import LAB, Entry, Piece

    places = ("a", "laptop", "one.yaml"), ("b", "pod", "two.yaml"), ("c", "pod", "two.yaml")
    rows = [
        Entry(LAB, name, "sweep", (Piece("2026-11-29", None, {"host": host, "recipe": recipe}),), "measured")
        for name, host, recipe in places
    ]
    facts = sweep_parts(rows)[0].rows
    assert (facts["instance"], facts["recipe"].text) == ("host laptop; host pod", "one.yaml, two.yaml")
