"""The walls of the house: rooms in one order, no circles, no JAX where it would slow a worker down, names that resolve.

`docs/architecture.md` has the list of rooms; everything else is read from the source.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tomat"
LIGHT_ROOMS = "base base/report data/density data/codec data/tokens data/dataset hardware train/runs launch".split()
"""Rooms that import no JAX, directly or through others."""
HEAVY = ("jax", "jaxlib", "levanter", "haliax", "equinox", "optax")


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def imported_names(module: str) -> list[str]:
    """Every name that a module imports, lazily and for types too, as `package.name`."""
    names = []
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_modules(module: str) -> set[str]:
    """The modules of tomat that a module imports."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imported_names(module)}
    return found & {*MODULES} - {module}


IMPORTS = {module: imported_modules(module) for module in MODULES}


def room_of(module: str) -> str:
    """The innermost room of the list that a module is in."""
    path = module.removeprefix("tomat.").replace(".", "/") + "/"
    return max((room for room in rooms() if path.startswith(f"{room}/")), key=len, default="")


@cache
def rooms() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("| room |") :].partition("\n\n")[0]
    return re.findall(r"^\| `([\w/]+)` \|", table, flags=re.MULTILINE)


def strings(tree: ast.Module) -> list[str]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


WINGS = {room.partition("/")[0] for room in rooms()}


def test_the_list_of_rooms_is_the_list_of_folders():
    folders = {path.name for path in PACKAGE.iterdir() if any(path.rglob("*.py"))}
    assert folders == WINGS
    assert not [room for room in rooms() if not (PACKAGE / room / "__init__.py").is_file()]
    no_room = {module for module in MODULES if not room_of(module)}
    assert no_room == {"tomat", *(f"tomat.{wing}" for wing in WINGS if wing not in rooms())}
    # A wing that is no room is a folder of rooms; tomat itself offers names of several.
    wings = no_room - {"tomat"}
    assert not [module for module in wings if MODULES[module].read_text(encoding="utf-8").count("import ")]
    # The rooms of a wing stand together, and the page's tree has the wings in the same order.
    order = [room.partition("/")[0] for room in rooms()]
    assert len([wing for wing, before in zip(order, [None, *order], strict=False) if wing != before]) == len(WINGS)
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text[text.index("\ntomat/  ") : text.index("\ntokenize/  ")]
    assert re.findall(r"^  (\w+)/ ", tree, flags=re.MULTILINE) == list(dict.fromkeys(order))


def test_a_room_imports_only_rooms_before_it():
    order = rooms()
    climbs = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if room_of(module) and room_of(other) and order.index(room_of(other)) > order.index(room_of(module))
    ]
    assert not climbs


def test_no_files_import_each_other():
    TopologicalSorter(IMPORTS).prepare()  # raises a CycleError that names them


def test_light_rooms_import_no_jax():
    """Nor do the packages that they import, among them Zephyr and pymatgen where they are imported at once."""
    modules = [module for module in MODULES if room_of(module) in LIGHT_ROOMS]
    named = {(module, name) for module in modules for name in imported_names(module)}
    assert not {(module, name) for module, name in named if name.split(".")[0] in HEAVY}
    code = "import importlib, sys\n"
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    code += f"sys.exit(' '.join(name for name in {HEAVY!r} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_modules_that_strings_name_exist():
    missing = {
        f"{module}: {text}"
        for module, tree in TREES.items()
        for text in strings(tree)
        if re.fullmatch(r"tomat(\.\w+)+", text)
        and text not in MODULES
        # A class or function: its module exists, and has it.
        and not (
            text.rpartition(".")[0] in MODULES
            and hasattr(importlib.import_module(text.rpartition(".")[0]), text.rpartition(".")[2])
        )
    }
    assert not missing


def test_files_that_code_and_guides_name_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in [*pages, *MODULES.values()] if path.stem != "CHANGELOG"
    }
    missing = {
        f"{name}: {path}"
        for name, text in texts.items()
        for path in re.findall(
            r"(?<![\w/.*])(?:tomat|tests|configs|profiling|docs/(?:guides|tracking))/[\w./-]+\.(?:py|md|yaml|json)\b",
            text,
        )
        if not (ROOT / path).exists()
    }
    assert not missing


def test_files_that_the_wheel_takes_from_outside_exist():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    taken = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in taken.items():
        assert (ROOT / source).exists()
        assert (ROOT / target).parent.is_dir() and not (ROOT / target).exists()
    module, _, function = project["project"]["scripts"]["tomat"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_what_is_imported_by_its_bare_name_is_no_package_and_there_once():
    """An `__init__.py` there would shadow the standard library's `tokenize` and `profiling`."""
    assert not [path for name in ("tokenize", "profiling") for path in (ROOT / name).rglob("__init__.py")]
    names = [path.stem for name in ("profiling", "tests/support") for path in (ROOT / name).glob("*.py")]
    assert not {*names} & {*packages_distributions(), *sys.stdlib_module_names, "tomat"}
    assert len({*names}) == len(names) > 10


@cache
def reached_by(test: Path) -> set[str]:
    """The modules of tomat that a test imports, starts as a process or reaches through those."""
    text = test.read_text(encoding="utf-8")
    named = {
        dotted[: end.start()] for dotted in re.findall(r"\btomat[\w.]*", text) for end in re.finditer(r"\b", dotted)
    }
    waiting = [module for module in MODULES if module in named]
    waiting += [
        f"{package}.{name}"
        for package, names in re.findall(r"from (tomat[\w.]*) import ([^\n(]+)", text)
        for name in names.replace(",", " ").split()
        if f"{package}.{name}" in MODULES
    ]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [*IMPORTS[module], *named_in(module)]
    return found


@cache
def named_in(module: str) -> list[str]:
    """The modules that a module has as strings, as `cli` has its verbs."""
    return [text for text in strings(TREES[module]) if text in MODULES]


def test_every_module_has_a_test_of_its_name_or_one_that_the_list_names():
    tests = ROOT / "tests"
    held_by = yaml.safe_load((tests / "held_by.yaml").read_text(encoding="utf-8"))
    modules = {str(path.relative_to(PACKAGE)): module for module, path in MODULES.items() if path.stem != "__init__"}
    named = {test.stem.removeprefix("test_") for test in tests.rglob("test_*_verbs.py")}
    own = {
        path
        for path in modules
        if (tests / path).with_name(f"test_{Path(path).name}").exists() or Path(path).stem in named
    }
    assert set(held_by) == set(modules) - own
    unreached = [path for path, test in held_by.items() if modules[path] not in reached_by(tests / test)]
    assert not unreached
