import json
from pathlib import Path

import pytest

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.model.tiles import LossTiles, TunedTiles, load_table, tuned_tiles
from tomat.perf.plan.compile.process import LLO_DUMP
from tomat.perf.plan.plan_cache import open_cache, open_result
from tomat.perf.tuning import tile_child, tile_tuning
from tomat.perf.tuning.tile_tuning import LossShape, table_entry, write_entry

SHAPE = LossShape(width=512, density_tokens=1024)


def candidate(seconds: float, *sizes: int) -> dict:
    tiles = vars(LossTiles(*sizes))
    return {
        "kernel": "pallas",
        "tiles": tiles,
        "seconds": seconds,
        "device_kind": "TPU v6 lite",
        "compiler": "libtpu 0",
    }


def test_the_shortest_is_written_in_the_place_of_an_older_one(tmp_path):
    xla = {
        "kernel": "xla",
        "block_positions": 256,
        "seconds": 0.5,
        "device_kind": "TPU v6 lite",
        "compiler": "libtpu 0",
    }
    refused = {"kernel": "pallas", "tiles": {}, "refused": "too large"}
    rows = [xla, candidate(3.0, 512, 256, 256, 32), candidate(2.0, 512, 256, 512, 32), refused]
    table = tmp_path / "tiles.json"
    write_entry(SHAPE, table_entry(SHAPE, rows), table)
    write_entry(SHAPE, table_entry(LossShape(width=64), [candidate(1.0, 64, 64, 128, 16)]), table)
    assert tuned_tiles("TPU v6 lite", 512, SHAPE.ids, "bfloat16", load_table(TunedTiles, table)) == LossTiles(
        512, 256, 512, 32
    )
    write_entry(SHAPE, table_entry(SHAPE, [candidate(1.5, 512, 128, 512, 32)]), table)
    load_table.cache_clear()
    entries = load_table(TunedTiles, table)
    assert len(entries) == 2
    assert tuned_tiles("TPU v6 lite", 512, SHAPE.ids, "bfloat16", entries) == LossTiles(512, 128, 512, 32)
    kept = json.loads(table.read_text())["entries"][1]
    assert kept["planned_seconds"] == 1.5
    assert kept["provenance"]["shape"]["density_tokens"] == 1024


def test_refuses_candidates():
    with pytest.raises(TomatError, match="none of 1 candidates .* too large"):
        table_entry(SHAPE, [{"kernel": "pallas", "tiles": {}, "refused": "too large"}])


@pytest.mark.parametrize("refused", [False, True])
def test_a_loss_that_the_compiler_refuses_is_an_answer_too(tmp_path, capsys, monkeypatch, refused):
    def measure(request, llo_dump):
        assert llo_dump == tmp_path / LLO_DUMP
        if refused:
            raise TomatError("too large")
        return {"seconds": 1.0}

    programs = open_cache(tmp_path / "cache")
    request = {"key": "abc", "work_dir": str(tmp_path), "programs_dir": str(programs)}
    monkeypatch.setattr(tile_child, "measure", measure)
    tile_child.answer_request(request)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"stage": "done", "key": "abc"}
    opened = open_result(Path(programs) / "abc")
    assert opened is not None and opened[1] == ({"refused": "too large"} if refused else {"seconds": 1.0})
    opened[0].close()


def test_the_verb_plans_both_and_finds_them_again(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("libtpu")
    report_file = tmp_path / "report.json"
    sizes = "--batch 1 --positions 256 --hidden_dim 128 --density_tokens 256 --vocabulary density"
    words = f"bench loss-tiles {sizes} --tiles 256,128,128,32 --block_positions 128 --cache_dir {tmp_path / 'cache'}"
    assert main([*words.split(), "--json", str(report_file)]) == 0
    xla, pallas = json.loads(report_file.read_text())["candidates"]
    # Four products against three, of the same arrays, none of them padded; the rest are elementwise operations.
    products = 2 * 256 * 128 * 256
    assert 4 * products <= pallas["loss_flops"]
    assert 3 * products <= xla["loss_flops"]
    for answer in (xla, pallas):
        assert answer["seconds"] == pytest.approx(sum(answer["categories"].values()))
        assert answer["categories"]["loss"] > 0
    kernels = {k["name"].split(".")[0]: k for k in pallas["kernels"]}
    assert kernels["loss_gradients"]["grid"] == [2]
    busy = [k["mxu_seconds"] for k in (kernels["loss_gradients"], kernels["loss_statistics"])]
    assert busy[0] == pytest.approx(3 * busy[1], rel=0.01)

    def no_compile(*arguments, **keywords):
        raise AssertionError("compiled again")

    monkeypatch.setattr(tile_tuning, "ask", no_compile)
    assert main([*words.split(), "--json", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_text() == report_file.read_text()
    assert "pallas" in capsys.readouterr().out
