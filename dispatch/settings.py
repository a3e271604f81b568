"""Environment variables: read once, here, strictly. `reload()` in op.py reads them again."""

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernelmux.capabilities import SettingError

PREFIX = "KERNELMUX_"
BACKEND = "KERNELMUX_BACKEND"
_SWITCHES = {
    "KERNELMUX_STRICT": "strict",
    "KERNELMUX_DETERMINISTIC": "deterministic",
    "KERNELMUX_BATCH_INVARIANT": "batch_invariant",
    "KERNELMUX_NO_COMPILE": "no_compile",
    "KERNELMUX_CHECK": "check",
}
_PATHS = {"KERNELMUX_POLICY": "policy", "KERNELMUX_RECORD": "record"}
_RESERVED = {
    "KERNELMUX_TUNED": "tuned tables",
    "KERNELMUX_VERIFY": "start-up verification",
    "KERNELMUX_CROSSCHECK": "cross-checking of live calls",
    "KERNELMUX_CACHE_DIR": "compiled kernels to cache",
}
_LOG = ("KERNELMUX_LOGLEVEL", "KERNELMUX_LOGDEST")
RETIRED: dict[str, str] = {}  # name -> what replaced it; names are never removed
NAMES = (BACKEND, *_PATHS, *_SWITCHES, *_LOG)
LOG_LEVELS = (0, 1, 3, 5)


@dataclass(frozen=True, slots=True)
class Choice:
    """A parsed preference: `names` in order, then everything else if `auto`; `never` is excluded."""

    names: tuple[str, ...] = ()
    auto: bool = True
    never: frozenset[str] = frozenset()
    source: str = ""
    exact: bool = False  # said for this very op or phase: a name that declares no kernel for it is an error

    def __str__(self) -> str:
        words = [*self.names, *(f"!{name}" for name in sorted(self.never))]
        return ",".join([*words, "auto"] if self.auto else words)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the environment says. `backends` maps a scope ("", "attention", "attention_decode") to a choice."""

    backends: Mapping[str, Choice] = field(default_factory=dict)
    policy: Path | None = None
    record: Path | None = None
    strict: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    no_compile: bool = False
    check: bool = False
    loglevel: int = 0
    logdest: str = "stderr"


def read(backends: Collection[str], scopes: Collection[str], env: Mapping[str, str] | None = None) -> Settings:
    """Parse the environment; SettingError for a name or value of ours that means nothing.

    `backends`: names that may be asked for; `scopes`: lower-case families, family_op and family_phase.
    """
    env = os.environ if env is None else env
    fields: dict[str, object] = {}
    choices: dict[str, Choice] = {}
    for name in sorted(n for n in env if n.startswith(PREFIX)):
        value = env[name]
        if name == BACKEND or name.startswith(BACKEND + "_"):
            scope = name[len(BACKEND) + 1 :].lower()
            if scope and scope not in scopes:
                known = [f"{BACKEND}_{s.upper()}" for s in scopes]
                raise SettingError(f"{name} is not a setting{_nearest(name, known)}")
            choices[scope] = parse_choice(value, backends, name, exact="_" in scope)
        elif name in _SWITCHES:
            fields[_SWITCHES[name]] = _switch(name, value)
        elif name in _PATHS:
            if not value:
                raise SettingError(f"{name} is empty; give a path or unset it")
            fields[_PATHS[name]] = Path(value)
        elif name == "KERNELMUX_LOGLEVEL":
            fields["loglevel"] = _level(name, value)
        elif name == "KERNELMUX_LOGDEST":
            if not value:
                raise SettingError(f"{name} is empty; give stdout, stderr or a path (%i becomes the process id)")
            fields["logdest"] = value
        else:
            raise _unknown(name)
    return Settings(backends=choices, **fields)  # type: ignore[arg-type]


def parse_choice(text: str, backends: Collection[str], source: str, exact: bool = False) -> Choice:
    """Parse "cudnn", "cudnn,flash_attn_3,auto" or "!flash_attn_2"; `backends` are the names and ids that exist.

    >>> parse_choice("cudnn,auto", ["cudnn"], "here").names
    ('cudnn',)
    """
    if not isinstance(text, str):
        raise SettingError(f"{source} is {text!r}, it must be a backend's name such as {_some(backends)}, or 'auto'")
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise SettingError(f"{source} is empty; give a backend such as {_some(backends)}, or unset it")
    names: list[str] = []
    never: set[str] = set()
    auto = False
    for word in words:
        bare = word.removeprefix("!")
        if word == "auto":
            auto = True
        elif bare not in backends:
            raise SettingError(f"{source} names {word!r}, no backend of that name{_nearest(bare, [*backends, 'auto'])}")
        elif word.startswith("!"):
            never.add(bare)
        else:
            names.append(word)
    if words[-1] != "auto" and auto:
        raise SettingError(f"{source} is {text!r}, 'auto' must come last")
    if clash := sorted(never & set(names)):
        raise SettingError(f"{source} is {text!r}, it both wants and excludes {clash[0]!r}")
    return Choice(tuple(names), auto or not names, frozenset(never), source, exact)


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise SettingError(f"{name} is {value!r}, 0 or 1")
    return value == "1"


def _level(name: str, value: str) -> int:
    if value not in map(str, LOG_LEVELS):
        raise SettingError(f"{name} is {value!r}, one of {', '.join(map(str, LOG_LEVELS))}")
    return int(value)


def _unknown(name: str) -> SettingError:
    if name in RETIRED:
        return SettingError(f"{name} was retired; use {RETIRED[name]}")
    if name in _RESERVED:
        return SettingError(f"{name} has no effect yet: this version has no {_RESERVED[name]}; unset it")
    return SettingError(f"{name} is not a setting{_nearest(name, NAMES)}")


def _some(names: Iterable[str]) -> str:
    return next(iter(sorted(names)), "auto")


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(set(known))
    lowered = {k.lower(): k for k in known}
    aliases = {"fa2": "flash_attn_2", "fa3": "flash_attn_3", "fa4": "flash_attn_4"}
    near = [aliases[name.lower()]] if aliases.get(name.lower()) in known else []
    near = near or [lowered[n] for n in difflib.get_close_matches(name.lower(), lowered, n=1)]
    short = [k for k in known if ":" not in k]
    if len(short) > 20:
        short = [*short[:20], "…"]
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" valid: {', '.join(short)}"
