"""The files of `assets/`, and the templates among them: every text that they are given is escaped, once and here."""

from __future__ import annotations

import importlib.resources
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def asset(name: str) -> str:
    """A file of `assets/`: a page's template, its style or one of its own programs."""
    return (importlib.resources.files("tomat.report.html") / "assets" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    loader = PackageLoader("tomat.report.html", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def prose(words: object) -> Markup:
    """Plain text; what stands between backticks is code."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(words)))


def rendered(name: str, **values: Any) -> Markup:
    """A template with its values; what is no `Markup` is text."""
    return Markup(_environment().get_template(name).render(values))
