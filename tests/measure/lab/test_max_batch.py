"""The search for the largest batch, over batches whose memory is a formula."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tomat.base.errors import TomatError
from tomat.measure.lab.max_batch import MaxBatch
from tomat.measure.lab.messages import FAILED, OUT_OF_MEMORY, Limits, RowError
from tomat.measure.lab.run import LabConfig
from tomat.report.pages.max_batch_page import write_max_batch_page

GIB = 2**30


def started(request, asked):
    """A process that takes 1 GiB and 100 MiB a sequence at a time, and fails or is refused above what it is given."""
    words = dict(zip(request.words[::2], request.words[1::2], strict=True))
    batch, micro = int(words["--trainer.train_batch_size"]), int(words["--trainer.per_device_parallelism"])
    asked.append(batch)
    used = GIB + (batch if micro == -1 else micro) * 100 * 2**20
    if words.get("--model.gradient_checkpointing") == "nested":
        raise RowError(FAILED, "such a policy fails")
    if used > request.config.limits.memory_bytes:
        raise RowError(OUT_OF_MEMORY, "used too much")
    window = {"step_seconds": 0.1 * batch, "tokens_per_second": 5120.0}
    window |= {"peak_memory_bytes": used, "others_busy_share": 0.0}
    return nullcontext(SimpleNamespace(described={"first_loss": 5.0}, window=lambda: window))


@pytest.fixture
def make(tmp_path):
    (tmp_path / "train.yaml").write_text("{}")
    setup = {"devices": "1 x cpu", "data_axis_size": 1, "memory_source": "process", "batch_sequences": 8,
             "sequence_tokens": 512, "policy": "off"}  # fmt: skip

    def make(asked, limit=4 * GIB, policies=(None,), accumulations=(1, 2), steps=2):
        return MaxBatch(
            "largest", tmp_path / "train.yaml", [], policies, accumulations, tmp_path / "track", tmp_path / "work",
            LabConfig(steps=steps, warmup_steps=0, limits=Limits(10.0, limit)),
            start=lambda request, on_stage: started(request, asked),
            describe=lambda path, words: setup,
        )  # fmt: skip

    return make


def test_accumulations_multiply_the_batch_and_the_page_has_the_edge(make, tmp_path):
    asked = []
    record = make(asked).run()
    assert [one["largest_batch_sequences"] for one in record["searches"]] == [30, 60]
    assert {30, 31, 60, 62} <= set(asked)
    page = write_max_batch_page(record, tmp_path / "track").read_text()
    assert "| 30 | 30 | 3.000 | 4,024M | 5,120 | 5.000 | MAX |" in page
    assert "| 31 | 31 | – | – | – | – | OOM |" in page and "- 31: used too much." in page
    # What is on record is not tried again; another limit is another question.
    again, less = [], []
    assert make(again).run()["searches"][0]["largest_batch_sequences"] == 30 and not again
    assert [one["accumulations"] for one in make([], accumulations=(3,)).run()["searches"]] == [1, 2, 3]
    assert make(less, limit=3 * GIB).run() and less
    with pytest.raises(TomatError, match="has probes of 2 steps, but 5 are asked for; give --steps 2"):
        make([], limit=3 * GIB, steps=5).run()
    assert len(make([], policies=("off", "off"), accumulations=(1,), limit=2 * GIB).run()["searches"]) == 1


def test_probes_that_had_the_machine_to_themselves_count_in_how_far_it_was_shared(make, tmp_path):
    record = make([], accumulations=(1,)).run()
    one = next(probe for probe in record["searches"][0]["probes"] if probe["status"] == "measured")
    one["others_busy_share"] = 0.4
    assert "The machine was shared" not in write_max_batch_page(record, tmp_path / "track").read_text()


def test_a_search_that_was_stopped_claims_no_edge_and_goes_on(make, tmp_path):
    search = make([], accumulations=(1,))

    def stop(what, probe):
        if probe.microbatch > 8:
            raise KeyboardInterrupt

    search.on_done = stop
    with pytest.raises(KeyboardInterrupt):
        search.run()
    text = write_max_batch_page(search.record(), tmp_path / "track").read_text()
    assert "not finished; run it again to go on" in text and "MAX" not in text
    asked = []
    text = write_max_batch_page(make(asked, accumulations=(1,)).run(), tmp_path / "track").read_text()
    assert "edge found" in text and "MAX" in text and 8 not in asked


def test_a_failure_that_is_not_of_memory_ends_a_search_and_no_other(make):
    record = make([], policies=("nested", "off")).run()
    assert "such a policy fails" in record["searches"][0]["stopped_by"]
    assert record["searches"][2]["largest_batch_sequences"] == 30
    with pytest.raises(TomatError, match="give --memory_limit_gib"):  # of a processor
        make([], limit=None).run()
