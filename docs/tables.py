"""Write the tables of `docs/verbs.md` and `docs/keys.md`: `uv run python docs/tables.py`. A test compares them.

Verbs are those of the command line's parser; keys are the fields of the settings' dataclasses with their docstrings,
read from the source, since importing them takes 17 s.
"""

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tomat.app.cli import build_parser
from tomat.base.report.document import read_document, replace_sections
from tomat.base.report.markdown import markdown_table
from tomat.base.report.text import code, plain

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "tomat"


def verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Every verb that can be run, and the sentence of its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                if name in told:  # not the second name of a verb
                    inner = list(verbs(below))
                    yield from inner or [(below.prog, told[name])]


@cache
def dataclasses() -> dict[str, ast.ClassDef]:
    """The dataclasses of tomat by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
                found[node.name] = node
    return found


def fields(name: str) -> dict[str, tuple[ast.AnnAssign, str]]:
    """The fields of a dataclass, those of its bases first, each with its docstring, or that of the base."""
    definition = dataclasses()[name]
    found = {}
    for base in definition.bases:
        if ast.unparse(base) in dataclasses():
            found |= fields(ast.unparse(base))
    for field, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            name = ast.unparse(field.target)
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            inherited = found[name][1] if name in found else ""
            found[name] = field, " ".join(str(after.value.value).split()) if documented else inherited
    return found


def settings(name: str, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of each field of a dataclass, with those of the dataclasses that it holds."""
    for field_name, (field, doc) in fields(name).items():
        key, given = f"{prefix}{field_name}", _given(field.value)
        held = [
            node.id
            for part in (field.annotation, given)
            if part is not None
            for node in ast.walk(part)
            if isinstance(node, ast.Name) and node.id in dataclasses()
        ]
        held += ["DensityDecoderConfig"] if key == "model" else []  # made by a function, so that it is not imported
        if held:
            unset = given is not None and ast.unparse(given) == "None"
            yield f"{key}.*", "not set" if unset else "", doc
            yield from settings(held[0], f"{key}.")
        else:
            yield key, _shown(given), doc


def _given(value: ast.expr | None) -> ast.expr | None:
    """The default in `key(default, ...)` and in `key(factory=...)` (`base/config_keys.py`)."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "key":
        return value
    if value.args:
        return value.args[0]
    factory = next(word.value for word in value.keywords if word.arg == "factory")
    return factory.body if isinstance(factory, ast.Lambda) else factory


def _shown(default: ast.expr | None) -> str:
    """A default as a configuration's file has it; nothing where code makes it."""
    if default is None:
        return "required"
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else str(value)


def contents() -> dict[str, dict[str, str]]:
    """Page -> name of the section -> its table."""
    of_verbs = [(code(name), plain(told)) for name, told in verbs(build_parser())]
    of_keys = [
        (code(key), code(default) if default else "", doc.replace("|", "\\|"))
        for key, default, doc in settings("TrainConfig")
    ]
    return {
        "verbs.md": {"verbs": markdown_table(("verb", "does"), of_verbs, "ll")},
        "keys.md": {"keys": markdown_table(("key", "default", "what it does"), of_keys, "lll")},
    }


def written() -> dict[Path, str]:
    """The text that each page should have."""
    return {
        DOCS / page: replace_sections(read_document(DOCS / page), sections, page)
        for page, sections in contents().items()
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
