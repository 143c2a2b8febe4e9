import pytest

from tomat.base.overrides import read_yaml
from tomat.base.shipped import shipped_configurations
from tomat.report.html.recipe import flat, nearest_recipe


@pytest.mark.parametrize("name", shipped_configurations("train"))
def test_a_shipped_configuration_is_nearest_to_itself_and_what_is_changed_is_what_differs(name):
    path = shipped_configurations("train")[name]
    settings = flat(read_yaml(path, "configs/train/")) | {"run_name": "another", "seed_of_nothing": 1}
    found = nearest_recipe(settings)
    assert found is not None and (found.name, found.differences(settings)) == (name, {})
    key = next(key for key, value in found.settings.items() if isinstance(value, int) and not isinstance(value, bool))
    changed = nearest_recipe(settings | {key: 12345}, [path])
    assert changed is not None and changed.differences(settings | {key: 12345}) == {key: (found.settings[key], 12345)}


def test_numbers_that_yaml_reads_as_text_are_the_same_numbers():
    found = flat({"a": {"b": 1, "c": {}}, "d": "1e-3"})
    assert found == {"a.b": 1, "a.c": {}, "d": "1e-3"}


def test_without_a_shipped_configuration_there_is_no_recipe():
    assert nearest_recipe({"a": 1}, []) is None
