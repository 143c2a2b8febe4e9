"""A run's data are known by their content: what counts, what is refused, what is recorded."""

from dataclasses import replace
from pathlib import Path

import pytest
from fitted_codec import fitted_codec
from tiny_run import DEMO, WITHOUT_ATOMS

from tomat.base.errors import TomatError
from tomat.base.layout import HISTORY_FILE
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import open_shards
from tomat.train.datasets import Datasets, open_datasets
from tomat.train.origins import Start
from tomat.train.runs.history import append_event, read_events, recorded_contents
from tomat.train.settings.config import load_config

NAMES = [material.material_id for material in demo_materials("train")][:3]


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """`a`, `again` (the same elsewhere), `other` (other patches), `fewer` (fewer materials); one codec."""
    folder = tmp_path_factory.mktemp("sets")
    codec = fitted_codec(64, *(load_demo(name).rho for name in NAMES))
    for place, names, seed in (("a", NAMES, 0), ("again", NAMES, 0), ("other", NAMES, 1), ("fewer", NAMES[:2], 0)):
        write_shards(
            folder / place, names, load_demo, layout=LAYOUTS["v3-p7"], codec=codec, patches_per_material=2, seed=seed
        )
    return folder


def datasets(sets: Path, train: str, validation: str | None = None) -> Datasets:
    return Datasets(open_shards(sets / train), None if validation is None else open_shards(sets / validation))


def plan(run: Path, allow: tuple[str, ...] = ()) -> Start:
    """As `plan_start` leaves it for a run that has checkpoints."""
    config = load_config(DEMO, ["--output_dir", str(run)])
    return Start(config, run, allow, data_of="run 'x'", contents=recorded_contents(read_events(run)))


def test_other_data_are_refused_with_both_hashes_unless_named(sets, tmp_path):
    start, now = plan(tmp_path), datasets(sets, "fewer", "a")
    recorded = replace(start, contents=datasets(sets, "a", "other").contents)
    assert recorded.settle(datasets(sets, "again", "other")).changed_data == {}
    with pytest.raises(TomatError) as refused:
        replace(recorded, allow_change=("data.validation",)).settle(now)
    text = str(refused.value)
    assert "--allow_change data.train" in text and "data.validation" not in text
    for place in ("a", "fewer"):
        assert open_shards(sets / place).content_sha256[:12] in text
    named = replace(recorded, allow_change=("data.train", "data.validation"))
    assert set(named.settle(now).changed_data) == {"data.train", "data.validation"}
    assert start.settle(now).changed_data == {}


def test_what_is_allowed_is_recorded_and_counts_from_then_on(sets, tmp_path, capsys):
    first = datasets(sets, "a", "other")
    Start(load_config(DEMO, ["--output_dir", str(tmp_path)]), tmp_path).settle(first).record(first)
    assert recorded_contents(read_events(tmp_path)) == first.contents

    second = datasets(sets, "fewer", "other")
    with pytest.raises(TomatError, match="--allow_change data.train"):
        plan(tmp_path).settle(second)
    plan(tmp_path, ("data.train",)).settle(second).record(second)
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == ["data", "allow_change", "data"]
    assert (events[1]["old"], events[1]["new"]) == (events[0]["train"], events[2]["train"])
    assert "does not differ" not in capsys.readouterr().out
    # The same command again, and the data of before.
    plan(tmp_path, ("data.train",)).settle(second).record(second)
    assert len(read_events(tmp_path)) == 3
    assert "--allow_change data.train: it does not differ" in capsys.readouterr().out
    with pytest.raises(TomatError, match="--allow_change data.train"):
        plan(tmp_path).settle(first)


def test_a_run_from_before_is_told_that_it_could_not_be_checked(sets, tmp_path, capsys):
    append_event(tmp_path, "start", 0)
    old = plan(tmp_path).settle(datasets(sets, "a"))
    assert (tmp_path / HISTORY_FILE).read_text().count("\n") == 1  # nothing is written before the state has loaded
    old.record(datasets(sets, "a"))
    assert "could not be checked" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(TomatError, match="other data"):
        plan(tmp_path).settle(datasets(sets, "other"))


def test_a_set_with_the_other_kind_of_codec_is_refused(sets, tmp_path):
    words = ["--data.source", "shards", "--data.train", str(sets / "a"), "--data.n_density_tokens", "64"]
    config = load_config(DEMO, [*words, "--data.codec_relative", "true"])
    with pytest.raises(TomatError, match="data.train has codec_relative False, the configuration says"):
        open_datasets(config, tmp_path)
    with pytest.raises(TomatError, match="data.codec_relative is true, and a model without model.environment"):
        load_config(DEMO, [*words, "--data.codec_relative", "true", *WITHOUT_ATOMS])
