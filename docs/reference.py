"""Hooks of the site: a page for each room of tomat, made of its docstrings; and nothing is loaded from elsewhere."""

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PACKAGE = Path(__file__).parents[1] / "tomat"
FOLDER = "reference"
LOADED = re.compile(r"<(?:script|img|iframe|link|source|video|audio)\b[^>]*?\b(?:src|href)=\"((?:https?:)?//[^\"]*)")
# mkdocs-jupyter 0.27.0 gives every notebook a script that loads MathJax from a server, and no setting to leave it out.
# No notebook here has formulas.
MATHJAX = re.compile(r"<script data-mkdocs-jupyter-mathjax=.*?</script>", flags=re.DOTALL)
log = logging.getLogger("mkdocs.hooks.reference")


def modules(wing: Path) -> list[str]:
    """Full names of a wing's modules, its package first."""
    found = []
    for path in sorted(wing.rglob("*.py"), key=lambda path: path.with_suffix("").parts):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found.append(name.removesuffix(".__init__"))
    return sorted(found)


def pages() -> dict[str, list[str]]:
    """The modules of each page: a wing that is one room, or a folder of a wing, by its dotted name."""
    found: dict[str, list[str]] = {}
    for wing in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        for module in modules(wing):
            parts = module.split(".")[1:]
            inside = len(parts) > 1 and (wing / parts[1]).is_dir()
            found.setdefault(".".join(parts[:2] if inside else parts[:1]), []).append(module)
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages to the navigation."""
    assert config.nav is not None
    config.nav.append({"Python": [{name: f"{FOLDER}/{name}.md"} for name in pages()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, found in pages().items():
        body = "\n\n".join(f"::: {module}" for module in found)
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=f"# tomat.{name}\n\n{body}\n"))
    return files


def on_post_page(output: str, *, page: Page, **_) -> str:
    """Leave out a notebook's loader of formulas; warn, which `--strict` refuses, where a page loads something that is
    not in the site."""
    output = MATHJAX.sub("", output)
    for url in LOADED.findall(output):
        log.warning(
            "%s loads %s; put it into docs/assets, so that the site opens without a network", page.file.src_uri, url
        )
    return output
