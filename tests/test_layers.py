"""Imports point down only, the bare folder names are never imported, and reading the environment stays in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "capabilities": {"capabilities"},
    "policies": {"policies", "capabilities"},
    "backends": {"backends", "capabilities"},
    "dispatch": {"dispatch", "policies", "backends", "capabilities"},
    "kernelmux": {"dispatch", "policies", "backends", "capabilities", ""},
}
FILES = [path for layer in MAY_IMPORT for path in sorted((ROOT / layer).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "kernelmux":
                yield from (f"kernelmux.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        assert name.partition(".")[0] not in {"dispatch", "backends", "policies", "capabilities"}, f"bare import {name}"
        if name == "kernelmux" and layer != "kernelmux":
            pytest.fail(f"{path}: imports the facade")
        if name.startswith("kernelmux."):
            part = name.split(".")[1]
            target = part if part in MAY_IMPORT else ""
            assert target in MAY_IMPORT[layer], f"{layer} may not import {name}"


def test_the_environment_is_read_in_one_place() -> None:
    for path in FILES:
        if path.name == "settings.py" or "engine" in path.parts or path.name.startswith("cli_"):
            continue
        source = path.read_text(encoding="utf-8")
        assert "os.environ" not in source and "getenv" not in source, path


def test_no_module_hides_behind_a_vague_name() -> None:
    vague = {"utils.py", "common.py", "manager.py", "base.py", "helpers.py", "misc.py"}
    assert not [path for path in FILES if path.name in vague]
