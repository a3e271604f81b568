"""Which able kernel is preferred: TOML rules, first match wins, each with its evidence."""

from kernelmux.policies.load import load, packaged
from kernelmux.policies.rule import Rule

__all__ = ["Rule", "load", "packaged"]
