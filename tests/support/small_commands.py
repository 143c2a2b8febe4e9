"""A command of every verb that takes a second or so, on files made in a folder that a test names."""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml
from tiny_run import DEMO

from tomat.app.cli import build_parser, main
from tomat.base.arguments import Parser
from tomat.train.runs.run_log import RUN, START, append_line

DATA = Path(__file__).parents[1] / "fixtures"

TOO_LONG = "train", "eval", "export", "compress", "plan", "launch", "runs serve", "lab", "bench", "doctor"
"""Verbs without a command here: they train, measure, compile, load a model, or serve until they are stopped."""


def leaves(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Parser]]:
    """Every verb's words and parser."""
    below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below and isinstance(parser, Parser):
        yield " ".join(words), parser
    for choices in below:
        for name, verb in (choices or {}).items():
            yield from leaves(verb, (*words, name))


VERBS = dict(leaves(build_parser()))


def is_too_long(verb: str) -> bool:
    return any(verb == one or verb.startswith(f"{one} ") for one in TOO_LONG)


def required_words(verb: str, file: str, run: str) -> list[str]:
    """What a verb cannot do without, of a file and a run's folder that are there."""
    words = {"launch": ["--zone", "z"], "plan": ["--config_path", file], "runs serve": [run]}.get(verb, [])
    words = [*words, *(["--config_path", file, "--step_seconds", "1"] if verb == "mfu" else [])]
    for group in VERBS[verb]._mutually_exclusive_groups:
        words += [group._group_actions[0].option_strings[0], file] if group.required else []
    for action in VERBS[verb]._actions:
        if action.required:
            value = "4" if action.dest == "bits" else run if action.dest in ("run_dir", "folders", "input") else file
            words += [*action.option_strings[:1], value]
    return words


def make_run(folder: Path, purpose: str) -> None:
    """A run that was trained once, under the name of its folder, and a line of it in the log of the folder above."""
    shutil.copytree(DATA / "before" / "run", folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"run_name": folder.name, "purpose": purpose}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with (folder / "history.jsonl").open("a") as file:
        file.write(json.dumps({"time": "2026-01-01", "event": "stop", "step": 2, "reason": purpose}) + "\n")
    append_line(str(folder.parent), RUN, folder.name, START, step=0, purpose=purpose, command=purpose, settings={})


def small_commands(place: Path, word: str) -> dict[str, list[str]]:
    """Words by verb; the files that they read are made below the folder `place`, and what they write goes there. `word`
    is part of every file's name, of the runs' names and purposes."""
    place.mkdir(parents=True, exist_ok=True)
    density, codec, atoms, shards = (str(place / f"{word}.{end}") for end in ("cube", "codec", "atoms", "shards"))
    structure = str(place / f"{word}.vasp")
    convert = ["density", "convert", "--demo", "LiF-rock-salt-ideal", "--output", density]
    rules = ["--valences", "Li=3,F=7"]
    fit = ["codec", "fit", "--input", density, "--bins", "16", "--output", codec]
    solve = ["promolecule", "fit", "--input", density, "--output", atoms]
    tokenize = ["tokenize", "--input", density, "--codec", codec, "--layout", "v3-p7", "--patches_per_material", "2"]
    for words in (convert, [*convert[:-1], structure], fit, solve, [*tokenize, "--output", shards]):
        assert main(words) == 0, words
    runs = [place / f"{word}-runs" / f"{word}-{number}" for number in (1, 2)]
    for run in runs:
        make_run(run, f"see [/x] {word}")
    hlo, retold = place / f"{word}.hlo.pb.gz", f"{shards}-2"
    shutil.copy(DATA / "profiles" / "v6e_step.hlo.pb.gz", hlo)
    config = place / f"{word}.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(DEMO.read_text()) | {"purpose": f"see [/x] {word}"}))
    predict = ["predict", "--promolecule", atoms, "--structure", structure, *rules]
    run, other = map(str, runs)
    return {
        "demo-data show": ["demo-data", "show", "CsCl-caesium-chloride-ideal"],
        "density show": ["density", "show", density, *rules],
        "density convert": [*convert[:2], "--input", density, "--output", structure],
        "density compare": ["density", "compare", density, density],
        "codec fit": fit,
        "codec show": ["codec", "show", codec],
        "promolecule fit": solve,
        "promolecule show": ["promolecule", "show", atoms],
        "tokenize": [*tokenize, "--output", retold],
        "retokenize": [
            "retokenize", "--source", "embedded", "--split", "validation", "--codec", codec, "--layout", "v3-p7",
            "--output", f"{retold}-3", "--patches_per_material", "1", "--workers", "1", "--max_clipped_share", "1",
        ],
        "tokens show": ["tokens", "show", shards],
        "tokens layouts": ["tokens", "layouts", "--atoms", "4"],
        "shards info": ["shards", "info", shards],
        "shards verify": ["shards", "verify", shards],
        "predict": [*predict, "--output", str(place / f"{word}-out")],
        "mfu": ["mfu", "--config_path", str(config), "--step_seconds", "9", "--slice", "v6e-1"],
        "profile": ["profile", str(hlo), "--device_kind", "TPU v6 lite", "--top", "1"],
        "runs list": ["runs", "list", str(runs[0].parent)],
        "runs show": ["runs", "show", run],
        "runs verify": ["runs", "verify", run],
        "runs log": ["runs", "log", str(runs[0].parent)],
        "runs compare": ["runs", "compare", run, other, "--output", str(place / f"{word}.compared.md")],
        "page": ["page", run, "--output", str(place / f"{word}.html")],
    }  # fmt: skip
