"""Keys read from source are those that the classes have, and no valid key is refused."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.settings.keys import RETOKENIZING, TRAINING, check_keys, check_words, known_fields

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_source_says_what_the_classes_say():
    """Of every class that is reached from the configuration: the same fields as the imported dataclass."""
    seen, queue = set(), [TRAINING, RETOKENIZING]
    while queue:
        place = queue.pop()
        fields = known_fields(place)
        if fields is None or place in seen:
            continue
        seen.add(place)
        cls = getattr(importlib.import_module(place[0]), place[1])
        assert set(fields) == {each.name for each in dataclasses.fields(cls)}, place
        queue += [below for below in fields.values() if below is not None]
    names = {name for _, name in seen}
    assert {"TrainConfig", "DataConfig", "LossConfig", "GuardsConfig", "TrainerConfig", "CheckpointerConfig"} <= names
    assert {"MeshConfig", "ProfilerConfig", "BlockShuffleConfig", "RetokenizeConfig"} <= names


@pytest.mark.parametrize("path", sorted((CONFIGS / "train").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_ships_passes_as_written_and_whole(path):
    from tomat.settings.config import load_config

    check_words(path, [])
    check_keys(load_config(path).to_dict(), "the whole configuration")


@pytest.mark.parametrize("path", sorted((CONFIGS / "tokenize").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_ships_to_retokenize_passes(path):
    check_words(path, [], RETOKENIZING)


def test_what_a_key_of_its_own_chooses_is_left_to_the_loader():
    check_keys({"model": {"type": "llama", "whatever": 1}, "optimizer": {"type": "muon", "other": 2}}, "a test")
    check_keys({"trainer": {"jax_config": {"any_flag": True}, "mesh": {"axes": {"model": 2}}}}, "a test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_nam: x", "a test sets run_nam, which is no setting; did you mean run_name?"),
        ("trainer: {mesh: {axis: 1}}", "trainer.mesh.axis"),
        ("data: {shuffle: {windows: 3}}", "data.shuffle.windows"),
        ("data: {zzz: 3}", "there are accept, codec_floor, codec_objective"),
        ("3: 4", "sets 3"),
    ],
)
def test_a_key_that_is_none_is_named(text, message):
    with pytest.raises(TomatError) as refused:
        check_keys(yaml.safe_load(text), "a test")
    assert message in str(refused.value)
