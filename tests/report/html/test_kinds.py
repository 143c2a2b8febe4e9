"""What a path is the page of, and what is said of a path that is none."""

import json
from pathlib import Path

import pytest
from small_promolecule import skewed_density

from tomat.base.errors import TomatError
from tomat.data.density.outputs import write_density
from tomat.report.html.document import page_html
from tomat.report.html.kinds import default_output, page_of


def test_each_kind_is_told_by_what_it_is(tmp_path, run, step):
    breakdown = tmp_path / "profile.json"
    breakdown.write_text(json.dumps(step.to_dict()))
    (tmp_path / "mp.json").write_text('{"task_id": "mp-1", "data": {}}')
    write_density(skewed_density(), tmp_path / "Si.cube", "cube")
    kinds = [page_of(str(path)).kind for path in (run, breakdown, tmp_path / "Si.cube")]
    assert kinds == ["run", "profile", "density"]
    (tmp_path / "empty").mkdir()
    for name, reference, words in (
        ("mp.json", None, "where a Materials Project charge density has"),
        ("empty", None, "a folder of another kind"),
        (run.name, "x.cube", "--reference is for a prediction"),
    ):
        with pytest.raises(TomatError, match=words):
            page_of(str(tmp_path / name), reference=reference)


def test_what_stands_below_a_figure_is_said_once():
    sweep = Path(__file__).parents[3] / "docs" / "tracking" / "sweeps" / "mfu-200m.json"
    assert page_html(page_of(str(sweep))).count(">Numbers are places in the ranking") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere.json", None, "does not exist"),
        ("other.json", "{}", "a JSON of another kind"),
        ("profile.json", '{"format_version": 1, "ops": 3}', "profile.json is damaged"),
        ("plan.json", '{"program_key": "x", "breakdown": null}', "the memory of the plan .*plan.json is damaged"),
        ("CHGCAR", "nothing", "CHGCAR"),
        ("page.html", "nothing", "has the name of another kind of file"),
    ],
)
def test_what_is_none_of_them_is_refused_in_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(TomatError, match=words):
        page_of(str(path))


def test_a_page_lies_beside_what_it_is_of_or_in_its_folder_and_a_bucket_needs_a_name(tmp_path):
    for target, page in (("plan.json", "plan.html"), ("a/Si.cube.gz", "a/Si.html"), ("t.xplane.pb", "t.html")):
        assert default_output(target) == Path(page)
    assert default_output(str(tmp_path)) == tmp_path / "index.html"
    (tmp_path / "Si.zarr").mkdir()
    assert default_output(str(tmp_path / "Si.zarr")) == tmp_path / "Si.html"
    with pytest.raises(TomatError, match="--output"):
        default_output("gs://bucket/run")
