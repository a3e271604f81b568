"""What the documents say is true: the README's example and table, the changelog's version, every doctest."""

import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernelmux
import kernelmux.backends
import kernelmux.capabilities
import kernelmux.dispatch
import kernelmux.policies
from kernelmux.dispatch import settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def modules() -> Iterator[str]:
    for package in (kernelmux.capabilities, kernelmux.policies, kernelmux.dispatch):
        yield package.__name__
        yield from (m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + "."))
    yield from (f"kernelmux.{p.stem}" for p in sorted((ROOT / "kernelmux").glob("*.py")) if not p.stem.startswith("__"))


@pytest.mark.parametrize("name", sorted(modules()))
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_public_functions_have_an_example_that_runs() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    missing = []
    for name in kernelmux.dispatch.__all__:
        value = getattr(kernelmux, name)
        if callable(value) and not isinstance(value, type) and not any(t.examples for t in finder.find(value, name)):
            missing.append(name)
    assert missing == []


def test_the_readme_example_runs() -> None:
    (block,) = re.findall(r"## Twenty lines\n\n```python\n(.*?)```", README, re.S)
    space: dict[str, object] = {}
    exec(block, space)
    assert space["out"].shape == (2, 8, 64)  # type: ignore[attr-defined]
    assert space["tokens"].shape == (2,)  # type: ignore[attr-defined]


def test_the_readme_names_every_setting() -> None:
    for name in (*settings.NAMES, *settings._RESERVED):
        assert f"`{name}`" in README, name


def test_ci_runs_the_command_of_the_readme() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "pytest" in commands[1]
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_changelog_names_this_version() -> None:
    assert f"## {kernelmux.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
