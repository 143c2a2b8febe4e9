"""The words of README and guides: every command that they show is one that the command line takes."""

import argparse
import ast
import importlib
import importlib.util
import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

from files_aside import parser_without_files

from tomat.app.cli import EXAMPLES, build_parser
from tomat.base.config_keys import fields_below
from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.train.settings.keys import check_words
from tomat.train.settings.schema import RunSchema

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("[a-z]*/README.md"))]
SHELL = ("bash", "console", "")
LAUNCHERS = {
    "train_tomat_tpu.py": ["train"],
    "profiling/parse_profile.py": ["profile"],
    "profiling/plan_step.py": ["plan"],
}
STUDIES = [
    f"profiling/{path.name}" for path in (ROOT / "profiling").glob("*.py") if "def build_parser(" in path.read_text()
]


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """Of `tomat`, or of a study, whose import may take seconds."""
    return build_parser() if name == "tomat" else importlib.import_module(Path(name).stem).build_parser()


def commands(text: str) -> Iterator[str]:
    """The command lines of a page's shell blocks; of a block without a language those behind `$ `."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        if language not in SHELL:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if language == "bash" or line.startswith("$ "):
                yield line.removeprefix("$ ")


def known_words(line: str) -> Iterator[tuple[str, list[str]]]:
    """`tomat`, or the study, and the words behind it, of every command of a line; some scripts are verbs."""
    for part in re.split(r"&&|\|\||[;|]", line):
        words = shlex.split(part, comments=True)
        for place, word in enumerate(words):
            if word in STUDIES or word == "tomat" or word in LAUNCHERS:
                yield word if word in STUDIES else "tomat", [*LAUNCHERS.get(word, ()), *words[place + 1 :]]
                break


def test_the_parsers_take_what_the_blocks_of_the_pages_and_the_examples_show():
    examples = [line for line in EXAMPLES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    lines = [(page, line) for page in PAGES for line in commands(page.read_text(encoding="utf-8"))]
    lines += [(EXAMPLES, line) for line in examples]
    wrong, seen = [], Counter()
    for page, line in lines:
        for name, words in known_words(line):
            seen["tomat" if name == "tomat" else "study"] += 1
            try:
                args, rest = parser_without_files(parser_of(name)).parse_known_args(words)
                if getattr(args, "takes_overrides", False):
                    check_words(None, rest, RetokenizeConfig if hasattr(args, "runner") else RunSchema)
            except TomatError as error:
                wrong.append(f"{page.relative_to(ROOT)}: {line}: {error}")
    assert not wrong and seen["tomat"] > 70 and seen["study"] >= 6
    readme = (ROOT / "profiling" / "README.md").read_text(encoding="utf-8")
    assert not [name for name in STUDIES if f"`{name.partition('/')[2]}`" not in readme]


def test_the_examples_of_what_is_added_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guides" / "adding.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})


def loaded(path: Path) -> ModuleType:
    """A module of `docs/`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"site_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = loaded(ROOT / "docs" / "tables.py")


def test_the_tables_of_verbs_and_keys_are_those_of_the_code():
    stale = [path.name for path, text in TABLES.written().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "uv run python docs/tables.py"


SAID_NOW = [
    path
    for path in [*PAGES, ROOT / "CONTRIBUTING.md"]
    if path.parent.name not in ("tracking", "archive") or path.name == "index.md"
]
"""Pages that speak of tomat as it is; those of `docs/tracking` speak of the day of their figures."""
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("tomat", "profiling", "tests", "tokenize")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TREE = [
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("*")
    if path.relative_to(ROOT).parts[0] not in (".git", ".venv", "site", "runs")
]
FOREIGN_FLAGS = {"--strict", "--extra", "--boot_disk", "--grpc_port"}
"""Of other commands than tomat's."""
WRITTEN_BY_LEVANTER = {"model.safetensors"}


def is_file(name: str) -> bool:
    """Whether a file or folder has this name or these last parts, or the code has the name of one that it writes."""
    name = name.rstrip("/")
    last = name.rpartition("/")[2]
    known = any(f"/{path}".endswith(f"/{name}") for path in TREE)
    written = not name.endswith(".py") and any(f'"{last}"' in text for text in SOURCES.values())
    return known or written or re.search(r"\b[A-Z]+\b(?!\.md$)|NAME", name) is not None


@cache
def keys_of_a_run() -> set[str]:
    """Those of tomat, of its field model too, and of Levanter's decoder those that tomat's has from it."""
    spec = importlib.util.find_spec("levanter")
    assert spec is not None and spec.submodule_search_locations
    llama = ast.parse((Path(spec.submodule_search_locations[0]) / "models" / "llama.py").read_text(encoding="utf-8"))
    (config,) = (node for node in llama.body if isinstance(node, ast.ClassDef) and node.name == "LlamaConfig")
    inherited = [ast.unparse(node.target) for node in config.body if isinstance(node, ast.AnnAssign)]
    found = {key.removesuffix(".*") for key, _, _ in TABLES.settings("TrainConfig")}
    found |= {key.removesuffix(".*") for key, _, _ in TABLES.settings("FieldConfig", "model.")}
    return found | {f"model.{key}" for key in ("type", *inherited)}


def is_key(name: str) -> bool:
    """Whether a key of a run, or a group of keys, has this name; below Levanter's own only the first part counts."""
    held_elsewhere = ("trainer.", "optimizer.", "model.rope.", "trackers.wandb.")
    return name in keys_of_a_run() or name.startswith(held_elsewhere)


def is_module(name: str) -> bool:
    """Whether a module or package has this dotted name, or one above it the name as something that it defines."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    files = [file for file in (path.parent.with_suffix(".py"), path.parent / "__init__.py") if file.is_file()]
    return any(re.search(rf"\b{path.name}\b", file.read_text(encoding="utf-8")) for file in files)


def exist(words: list[str], parser: argparse.ArgumentParser) -> bool:
    """Whether the verbs and flags exist of what a page says in passing, which may leave out what a verb needs."""
    while words and (below := [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]):
        name, *words = words
        choices = below[0].choices or {}
        if name.rstrip(",") not in choices:
            return False
        parser = choices[name.rstrip(",")]
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    taken = [*parser._option_string_actions, *(f"--{key}" for key in fields_below(RunSchema))]
    return all("." in flag or flag in taken for flag in flags)


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in (action.choices or {}).values():
                yield from flags_of(below)


def test_files_keys_flags_verbs_and_modules_that_pages_name_exist():
    parser = build_parser()
    verbs = {name.removeprefix("tomat ") for name, _ in TABLES.verbs(parser)}
    flags = {*flags_of(parser), *FOREIGN_FLAGS}
    for study in STUDIES:
        flags |= {*flags_of(parser_of(study))}
    groups = {verb.partition(" ")[0] for verb in verbs if " " in verb}
    settings, retokenizing = set(fields_below(RunSchema)), set(fields_below(RetokenizeConfig))
    wrong, seen = [], dict.fromkeys(("file", "key", "flag", "verb", "module"), 0)
    for page in SAID_NOW:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for span in re.findall(r"`([^`\n]+)`", text):
            first, _, rest = span.removeprefix("tomat ").partition(" ")
            dotted = re.match(r"(?:--)?([a-z_]+(?:\.\w+)+)(?=$|[:= ]|\.\*)", span)
            flag = re.match(r"--[a-z][\w-]*(?![\w.-])", span)
            if re.fullmatch(r"[\w-][\w./-]*(\.(py|md|yaml|json|jsonl|npz|txt|toml|ipynb)|\w/)", span):
                kind, known = "file", is_file(span)
            elif re.fullmatch(r"tomat(\.\w+)+(\(.*)?", span):
                kind, known = "module", is_module(span.partition("(")[0])
            elif dotted and dotted[1].partition(".")[0] in settings and dotted[1] not in WRITTEN_BY_LEVANTER:
                kind, known = "key", is_key(dotted[1])
            elif flag:
                name = flag[0].replace("-", "_").replace("__", "--", 1)
                of_a_run = name.removeprefix("--") in settings | retokenizing
                kind, known = "flag", bool({flag[0], name} & flags) or of_a_run or name.startswith("--xla")
            elif re.match("tomat [a-z]", span) and not re.search(r"[|[(]|\.\.\.", span):
                kind, known = "verb", exist(span.split()[1:], parser)
            elif first in groups and re.match(r"[a-z][\w-]*$", rest):
                kind, known = "verb", f"{first} {rest}" in verbs
            else:
                continue
            seen[kind] += 1
            if not known:
                wrong.append(f"{page.relative_to(ROOT)}: no {kind} `{span}`")
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for package, names in re.findall(r"^from (tomat[\w.]*) import (.+)$", block, flags=re.MULTILINE):
                imported = [f"{package}.{name.split()[0]}" for name in names.split(",")]
                wrong += [f"{page.relative_to(ROOT)}: no {name}" for name in imported if not is_module(name)]
    assert not wrong, "\n".join(wrong)
    assert min(seen.values()) > 5, seen


def test_the_reference_has_every_module():
    found = {name for page in loaded(ROOT / "docs" / "reference.py").pages().values() for name in page}
    paths = (path for path in (ROOT / "tomat").rglob("*.py") if path.stem != "__init__")
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    assert {name for name in found if not (ROOT / name.replace(".", "/")).is_dir()} == modules


def test_a_page_that_loads_something_from_elsewhere_is_told(caplog):
    hooks = loaded(ROOT / "docs" / "reference.py")
    places = "guides/x.md", "notebooks/x.ipynb"
    page, notebook = (SimpleNamespace(file=SimpleNamespace(src_uri=place)) for place in places)
    alone = '<a href="https://jax.dev">JAX</a><script src="x.js"></script><code>src="https://x"</code>'
    foreign = '<script src="https://cdn.example/x"></script>'
    for html in (alone, foreign, '<link rel="stylesheet" href="//fonts.example/x.css">', '<img src="http://x/y.png">'):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert hooks.on_post_page(html, page=page) == html
        assert len(caplog.records) == (html != alone)
    # The loader of formulas is left out of notebooks.
    html = '<p>a</p><script data-mkdocs-jupyter-mathjax="{&quot;url&quot;: &quot;https://x&quot;}">\nload()\n</script><p>b</p>'
    assert hooks.on_post_page(html, page=notebook) == "<p>a</p><p>b</p>"
