from loss_memory import build_parser
from reported import reported


def test_reports_the_logits_that_the_plain_formulas_hold(tmp_path, capsys):
    sizes = "--batch 2 --positions 512 --hidden_dim 16 --density_tokens 1024 --block_positions 32 --dtype float32"
    report = reported(tmp_path, *sizes.split(), parser=build_parser())
    logits_bytes = 2 * 512 * 1024 * 4
    assert report["plain_temp_bytes"] >= logits_bytes
    assert report["blocked_temp_bytes"] < logits_bytes / 2
    assert report["arguments_bytes"] >= 4 * 16 * (2 * 512 + 1024)
    assert "blocks of   32 positions" in capsys.readouterr().out
