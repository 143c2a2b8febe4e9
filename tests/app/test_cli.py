"""The command line: what is refused, how fast, and what a report on standard output is."""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from small_commands import VERBS, required_words
from small_promolecule import promolecule, skewed

from tomat.app.cli import build_parser, main
from tomat.base.arguments import report_file
from tomat.base.overrides import parse_overrides
from tomat.base.reporting import json_on_standard_output

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "levanter", "pymatgen", "scipy", "matplotlib", "numpy")
"""JAX with Levanter takes 17 seconds of CPU time to import, and NumPy as long as everything else of `--help`."""


RESULT = "result "
CONFIG, RUN = "configs/train/demo.yaml", "tests/fixtures/run"
CODE = """
import contextlib, io, json, sys
from tomat.app.cli import main
for words in json.loads(sys.argv[1]):
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    print("result", json.dumps([status, told.getvalue(), [name for name in sys.argv[2:] if name in sys.modules]]))
"""
OF_SETTINGS = {"numpy"}
"""What looking at a configuration's keys, fields of light dataclasses, imports: 0.1 s."""


def run_apart(lines: list[list[str]]) -> list[tuple[int, str, set[str]]]:
    """Run command lines in one fresh process: status, standard error, and heavy modules imported by then, of each."""
    words = [sys.executable, "-c", CODE, json.dumps(lines), *HEAVY]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    found = [json.loads(line[len(RESULT) :]) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    return [(status, told, set(loaded)) for status, told, loaded in found]


def test_no_verb_imports_anything_heavy_for_its_help_or_to_refuse_a_flag():
    helps = [["--help"], ["--version"], *([*verb.split(), "--help"] for verb in VERBS)]
    wrong = [[*verb.split(), *required_words(verb, CONFIG, RUN), "--no_such_flag"] for verb in VERBS]
    for words, (status, told, loaded) in zip([*helps, *wrong], run_apart([*helps, *wrong]), strict=True):
        if words in helps:
            assert status == 0 and not loaded, words
        else:
            assert status == 2 and "no_such_flag" in told and loaded <= OF_SETTINGS, (words, told)
            assert told.startswith("error: ") and told.count("\n") == 1


WRONG = [
    ("eval --run nowhere", "nowhere is not a run"),
    ("eval --run RUN --batch_size 0", "--batch_size: found '0', expected a whole number of at least 1"),
    ("eval --run RUN --input nowhere/CHGCAR", "nowhere/CHGCAR does not exist"),
    ("eval --run RUN --json configs", "configs is a folder"),
    ("eval --run RUN --picture plane.gif", "--picture: cannot draw to plane.gif, expected a name that ends in .png"),
    ("eval --run RUN --against missing.json", "missing.json does not exist"),
    ("eval --steps 3", "--leave_one_out CONFIG"),
    ("eval --run RUN --folds 3", "--leave_one_out CONFIG"),
    ("eval --model.members 1", "--model.members"),
    ("eval --leave_one_out demo --modell.members 1", "modell"),
    ("train --config_path nowhere.yaml", "nowhere.yaml does not exist; these ship with tomat and are found"),
    ("train CONFIG --trainer.num_train_stepz 3", "did you mean trainer.num_train_steps?"),
    ("train CONFIG --loss.kind", "--loss.kind has no value"),
    ("train CONFIG --fork_step 3", "--fork_step needs --fork"),
    ("train --teacher RUN --quantised configs", "configs has no config.yaml; give a folder"),
    ("plan --slice v6e-16", "give --config_path"),
    ("predict --structur README.md --output x", "--structur is not known; did you mean --structure?"),
    ("pedict --structure README.md --output x", "pedict is not known; did you mean predict?"),
    ("--verison", "did you mean --version?"),
    ("train demo", "a configuration is named by --config_path"),
    ("train --data.groups crystals", "data.groups to 'crystals'; expected a list, as in [crystals]"),
    ("train CONFIG --resume", "resume, which is no setting; there are"),
    ("train CONFIG --resume yes", "resume, which is no setting; there are"),
    ("page README.md", "README.md has the name of another kind of file"),
    ("page docs/tracking/data/200m-v6e16-fast-plan.json", "its page is 200m-v6e16-fast-plan.md"),
    ("predict --run RUN --structure README.md --output x --valences Sr", "found 'Sr', expected SYMBOL=N"),
    ("predict --run RUN --structure README.md --output x --valences Sr=10,Q=7", "found 'Q=7', expected SYMBOL=N"),
    ("predict --run RUN --structure README.md --output x --format qe", "--vectors_from goes with --format qe"),
    ("predict --run RUN --structure README.md --output x --format cube --augmentation_from README.md", "not cube"),
    ("predict --run RUN --structure README.md --output README.md", "--output README.md is a file"),
    ("predict --promolecule README.md --structure README.md --output x --seed 1", "--seed is for --run"),
    ("predict --run RUN --structure README.md --output x --kv_cache_dtype int8", "add --decoder autoregressive"),
    ("eval --run RUN --free_running --kv_cache_dtype int8", "is for the decoder autoregressive"),
    ("mfu CONFIG", "--step_seconds is missing"),
    ("mfu CONFIG --step_seconds 2 --slice v6e-5", "slice 'v6e-5' is not known"),
    ("launch CONFIG", "--zone is missing"),
    ("retokenize --output x --patches 3", "did you mean patches_per_material?"),
    ("export --run RUN --output configs", "--output configs is there already"),
    ("small_models --run x", "`tomat small_models` is now `python profiling/small_models.py`"),
    ("demo-data build --only x", "profiling/embedded_set.py"),
    ("shards import old", "profiling/import_first_generation.py"),
    ("tokens layouts --context 100", "No layout has a context of 100 tokens; expected one of 256, 512, 1536"),
    ("bench preemption --kills 3", "`tomat bench preemption` is now `python profiling/preemption_soak.py`"),
    ("", "required: VERB"),
    # Words that would do nothing.
    ("plan --sweep mfu-200m --slice v6e-32", "which --slice does not change"),
    ("plan --calibrate --docs", "which --docs does not change"),
    ("plan --config_path demo --max_batch --emit best.yaml", "--max_batch writes no --emit"),
    ("plan --config_path demo --policies full", "--policies is for --max_batch"),
    ("plan --config_path demo --workers 2", "--workers is for rows of --sweep or --runs"),
    ("eval --leave_one_out demo --seed 3", "--seed does not go with --leave_one_out"),
    ("eval --leave_one_out demo --groups molecules", "--groups does not go with --leave_one_out"),
    ("eval --leave_one_out demo --step 0", "--step does not go with --leave_one_out"),
    ("profile compare a.json b.json --session x", "--session is for one profile"),
    ("profile compare a.json b.json --docs x", "--docs is for one profile"),
    ("profile a.json --run_name r1", "--run_name is for the page of a run; give --docs"),
    ("profile a.json --date 2026-01-02", "--date is for the page of a run; give --docs"),
    ("profile index nowhere --json x.json", "--json does not go with index"),
    ("plan compare a.json b.json --slice v6e-16", "--slice does not go with compare"),
    ("plan compare a.json b.json --docs", "--docs does not go with compare"),
    ("profile compare a b --fail_percent nan", "--fail_percent: found 'nan', expected a percentage"),
    ("tokenise --demo train", "tomat tokenize --help"),
    ("runs serve nowhere", "nowhere does not exist"),
    ("runs serve --host 0.0.0.0", "give --token too"),
    ("runs serve --port 70000", "a port from 1 to 65535"),
    # How much is said.
    ("--quiet demo-data show --verbose", "--quiet and --verbose are both given"),
    ("--log_level loud demo-data show", "(choose from 'debug', 'info', 'warning', 'error')"),
    ("--quite demo-data show", "did you mean --quiet?"),
    ("--verbose demodata show", "did you mean demo-data?"),
]


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[int, str, set[str]]]:
    """What became of each command line of `WRONG`, in one process: what one of them imports, later ones show too."""
    places = {"CONFIG": ["--config_path", "configs/train/200m-v6e16.yaml"], "RUN": [RUN]}
    lines = [[each for word in words.split() for each in places.get(word, [word])] for words, _ in WRONG]
    return dict(zip([words for words, _ in WRONG], run_apart(lines), strict=True))


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_words_are_one_line_before_anything_heavy(words, message, refusals):
    status, told, loaded = refusals[words]
    assert status == 2 and message in told, told
    assert told.startswith("error: ") and told.count("\n") == 1
    assert not loaded - {"numpy"}


def test_every_argument_of_every_verb_says_what_it_is_and_has_underscores():
    for words, parser in VERBS.items():
        assert parser.description, words
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        assert not [flag for flag in flags if "-" in flag[2:]], words
        for action in parser._actions:
            # A default alone does not say what it is the default of.
            said = re.sub(r"\(?defaults?:?.*?(\)|$)", "", action.help or "")
            assert len(said) > 5 and action.help != argparse.SUPPRESS, (words, action.dest)
            assert action.dest != "json" or action.type is report_file, words


def test_flags_are_taken_with_dashes():
    parser = build_parser()
    for spelt in ("--patches-per-material", "--patches_per_material", "--patches-per_material"):
        args, _ = parser.parse_known_args(["eval", "--run", str(ROOT / RUN), spelt, "3", "--batch-size=2"])
        assert (args.patches_per_material, args.batch_size) == (3, 2)
    args, rest = parser.parse_known_args(["plan", "--max-batch", "--trainer.num-train-steps", "--a-b", "--x-y=p-q"])
    # The value of an override stays as it is.
    assert args.max_batch and parse_overrides(rest) == {"trainer": {"num_train_steps": "--a-b"}, "x_y": "p-q"}
    assert parser.parse_known_args(["demo_data", "show", "demo_data"])[0].material_id == "demo_data"


def test_the_words_of_the_launcher_reach_its_verb(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("run_name: teacher\n")
    monkeypatch.setattr(sys, "argv", ["train_tomat_tpu.py", "--teacher", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "train_tomat_tpu.py"), run_name="__main__")
    assert left.value.code == 2 and "needs --teacher RUN and --quantised DIR" in capsys.readouterr().err


def test_a_report_on_standard_output_is_alone_there(tmp_path, capfd):
    words = ["demo-data", "show", "--json"]
    assert main([*words, "-"]) == main([*words, str(tmp_path / "figures.json")]) == 0
    told = capfd.readouterr()
    report, end = json.JSONDecoder().raw_decode(told.out)
    assert report == json.loads((tmp_path / "figures.json").read_text())
    assert "LiF-rock-salt" in told.err and "LiF-rock-salt" in told.out[end:]
    # Nor do child processes write between the JSON.
    with json_on_standard_output() as file:
        subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
        file.write_text('{"a": 1}\n')
    told = capfd.readouterr()
    assert told.out == '{"a": 1}\n' and told.err == "of a child\n"


def test_a_structure_becomes_a_chgcar_by_few_modules(tmp_path):
    (tmp_path / "atoms.json").write_text(promolecule().to_text())
    skewed().to(str(tmp_path / "POSCAR"), fmt="poscar")
    words = ["predict", "--promolecule", "atoms.json", "--structure", "POSCAR", "--grid", "8", "8", "8"]
    code = "import sys; from tomat.app.entry import main\n"
    code += f"status = main({[*words, '--output', 'out']!r})\n"
    code += "walk = [name for name in sys.modules if name.split('.')[0] == 'tomat']\n"
    code += "sys.exit(status or (len(walk) > 55 and f'{len(walk)} modules'))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert len(list((tmp_path / "out").glob("*.CHGCAR"))) == 1
