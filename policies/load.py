"""Rules from TOML files, with errors that name file, rule and key."""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kernelmux.capabilities.errors import RuleError
from kernelmux.capabilities.request import dtype_of
from kernelmux.capabilities.support import Limit
from kernelmux.policies.rule import Rule

HERE = Path(__file__).parent
_KEYS = ("name", "op", "phase", "device", "arch", "when", "dtypes", "features", "without", "order", "why", "evidence")
_LIMIT_KEYS = ("min", "max", "multiple_of", "one_of")


@cache
def packaged() -> tuple[Rule, ...]:
    """The rules that ship with kernelmux, in the order of their file names."""
    return tuple(rule for path in sorted(HERE.glob("*.toml")) for rule in load(path))


def load(path: Path | str, source: str = "packaged rule") -> tuple[Rule, ...]:
    """Read one policy file; RuleError for anything that cannot be read or means nothing."""
    import tomllib  # not at the top: `import kernelmux` reads no policy

    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(f"policy file {path}: {error.strerror or error}; give a readable TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"policy file {path}: not TOML: {error}") from error
    if extra := sorted(set(data) - {"rule"}):
        raise RuleError(f"policy file {path}: unknown table {extra[0]!r}, only [[rule]] tables are allowed")
    tables = data.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise RuleError(f"policy file {path}: 'rule' must be an array of tables, write [[rule]]")
    rules = tuple(_rule(path, i, table, source) for i, table in enumerate(tables))
    names = [rule.name for rule in rules]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise RuleError(f"policy file {path}: two rules are named {twice[0]!r}; give each its own name")
    return rules


def _rule(path: Path, index: int, table: Mapping[str, Any], source: str) -> Rule:
    where = f"policy file {path}: rule {table.get('name', f'number {index + 1}')!r}"
    for key in table:
        if key not in _KEYS:
            raise RuleError(f"{where}: unknown key {key!r}{_nearest(key, _KEYS)}")
    for key in ("name", "op", "order", "why"):
        if not table.get(key):
            raise RuleError(f"{where}: key {key!r} is missing or empty")
    for key in ("name", "op", "phase", "device", "why"):
        if not isinstance(table.get(key, ""), str):
            raise RuleError(f"{where}: key {key!r} is {table[key]!r}, it must be a string")
    if table.get("device", "") not in ("", "cuda", "cpu"):
        raise RuleError(f"{where}: key 'device' is {table['device']!r}, one of 'cuda', 'cpu'")
    for role, name in _table(where, "dtypes", table).items():
        try:
            dtype_of(str(name))
        except ValueError as error:
            raise RuleError(f"{where}: key 'dtypes.{role}': {error}") from error
    when = _table(where, "when", table)
    return Rule(
        name=table["name"],
        op=table["op"],
        order=_names(where, "order", table),
        why=table["why"],
        phase=table.get("phase", ""),
        device=table.get("device", ""),
        arch=_limit(where, "arch", _table(where, "arch", table)),
        when={dim: _limit(where, f"when.{dim}", value) for dim, value in when.items()},
        dtypes=_table(where, "dtypes", table),
        features=frozenset(_names(where, "features", table)),
        without=frozenset(_names(where, "without", table)),
        evidence={k: str(v) for k, v in _table(where, "evidence", table).items()},
        source=source,
    )


def _table(where: str, key: str, table: Mapping[str, Any]) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise RuleError(f"{where}: key {key!r} is {value!r}, it must be a table")
    return value


def _names(where: str, key: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise RuleError(f"{where}: key {key!r} is {value!r}, it must be a list of names")
    return tuple(value)


def _limit(where: str, key: str, value: Any) -> Limit:
    if isinstance(value, int) and not isinstance(value, bool):
        return Limit(one_of=(value,))
    if not isinstance(value, dict):
        raise RuleError(f"{where}: key {key!r} is {value!r}, it must be an integer or a table of min, max, one_of")
    for name, number in value.items():
        if name not in _LIMIT_KEYS:
            raise RuleError(f"{where}: key '{key}.{name}' is unknown{_nearest(name, _LIMIT_KEYS)}")
        numbers = number if name == "one_of" and isinstance(number, list) else [number]
        if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            raise RuleError(f"{where}: key '{key}.{name}' is {number!r}, it must be an integer or, for one_of, a list")
    fields = dict(value)
    if fields.get("multiple_of", 1) < 1:
        raise RuleError(f"{where}: key '{key}.multiple_of' is {fields['multiple_of']}, it must be at least 1")
    if "min" in fields and "max" in fields and fields["min"] > fields["max"]:
        raise RuleError(f"{where}: key {key!r} has min {fields['min']} above max {fields['max']}; nothing matches")
    if "one_of" in fields:
        fields["one_of"] = tuple(fields["one_of"]) if isinstance(fields["one_of"], list) else (fields["one_of"],)
    return Limit(**fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else f", known are {', '.join(known)}"
