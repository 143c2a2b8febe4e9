from types import SimpleNamespace

import pytest

from tomat.app.workflow import leave_one_out as module
from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import GROUPS, compounds_of, demo_materials
from tomat.train.settings.config import load_config


def test_all_forms_of_a_compound_are_left_out_and_no_other():
    compounds = compounds_of(GROUPS)
    every = {each.material_id for each in demo_materials("train", GROUPS)}
    assert every == {name for names in compounds.values() for name in names}
    without = {each.material_id for each in demo_materials("train", GROUPS, ["GaAs"])}
    assert every - without == set(compounds["GaAs"]) and "GaAs-zinc-blende-slab-110-ideal" in compounds["GaAs"]


def test_an_interrupted_night_goes_on_and_each_is_judged_by_what_it_has_not_seen(monkeypatch, tmp_path):
    trained, judged, stopped = [], [], {"Si"}

    def train(config):
        trained.append(config)
        return SimpleNamespace(run_dir=config.run_dir, preempted=set(config.data.left_out) <= stopped)

    def judge(_predictor, names, _load, settings, _groups):
        judged.append(names)
        figures = {"free_running_nmae": {"mean": 0.01 * len(judged)}, "promolecule_nmae": {"mean": 0.05}}
        return SimpleNamespace(to_dict=lambda: {"settings": settings, "over_materials": figures})

    run = SimpleNamespace(settings=lambda words: {"materials_from": words})
    for name, stand_in in {"train": train, "predict_with_bar": judge}.items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(module, "load_trained", lambda folder: run)
    known = SimpleNamespace(elements=tuple(range(1, 119)))
    monkeypatch.setattr(module, "RunPredictor", lambda run: SimpleNamespace(promolecule=known))

    def load(words):
        return load_config("demo", ["--output_dir", str(tmp_path), *words])

    with pytest.raises(TomatError, match="without Si; the same command goes on"):
        module.leave_one_out(load, ["GaAs", "Si", "MgS"])
    stopped.clear()
    found = module.leave_one_out(load, ["GaAs", "Si", "MgS"])
    assert [config.data.left_out for config in trained] == [("GaAs",), ("Si",), ("Si",), ("MgS",)]
    compounds = compounds_of(trained[0].data.groups)
    assert judged == [compounds[name] for name in ("GaAs", "Si", "MgS")]
    table, over = module.over_compounds(found)
    assert [row[0] for row in table.rows][:3] == ["MgS", "Si", "GaAs"]
    assert over == pytest.approx({"compounds": 3, "median": 0.02, "mean": 0.02})
    with pytest.raises(TomatError, match="other settings"):
        module.leave_one_out(lambda words: load([*words, "--trainer.num_train_steps", "60"]), ["GaAs"])
    with pytest.raises(TomatError, match="no training compound 'GaP'"):
        module.leave_one_out(load, ["GaP"])
    del trained[:], judged[:]
    found = module.leave_one_out(load, ["GaAs", "Si", "MgS"], folds=2)
    assert [config.data.left_out for config in trained] == [("GaAs", "MgS"), ("Si",)]
    assert judged == [compounds[name] for name in ("GaAs", "MgS", "Si")] and set(found) == {"GaAs", "MgS", "Si"}
    assert module.leave_one_out(load, ["GaAs", "Si", "MgS"], folds=2) == found and len(trained) == 2
    known.elements = (12, 14, 16)
    elsewhere = ["--output_dir", str(tmp_path / "other")]
    found = module.leave_one_out(lambda words: load([*words, *elsewhere]), ["GaAs", "MgS"], folds=2)
    assert found["GaAs"]["unseen_elements"] == ["Ga", "As"] and module.over_compounds(found)[1]["compounds"] == 1
    with pytest.raises(TomatError, match="none of the compounds was judged"):
        module.over_compounds({"GaAs": found["GaAs"]})
    with pytest.raises(TomatError, match="expected 2 to 3, the number of compounds"):
        module.leave_one_out(load, ["GaAs", "Si", "MgS"], folds=4)
