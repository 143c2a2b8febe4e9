"""What nothing reads is found, and where the table says otherwise."""

import levanter_settings
from reported import reported

from tomat.app.cli import main


def test_the_table_is_right_and_one_without_a_field_is_not(tmp_path, monkeypatch, capsys):
    found = reported(tmp_path, "--kinds", "lion", "default", "cosine", parser=levanter_settings.build_parser())
    assert found["unread"]["optimizer lion"] == ["epsilon"] and found["not_as_the_table"] == []
    assert {name.split()[0] for name in found["unread"]} == {"optimizer", "rotary", "schedule"}
    monkeypatch.setattr(levanter_settings, "OPTIMIZER_NO_EFFECT", {})
    assert main(["--kinds", "cosine", "lyon"], levanter_settings.build_parser()) == 2
    assert "--kinds names lyon" in capsys.readouterr().err
    assert main(["--kinds", "lion"], levanter_settings.build_parser()) == 1
    assert "not as the table says: optimizer lion: epsilon" in capsys.readouterr().out
