"""Why a kernel cannot serve a call."""

from dataclasses import dataclass

KINDS = ("broken", "missing", "version", "toolchain", "disabled", "device", "feature", "dtype", "shape")
_RANK = {kind: i for i, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Reason:
    """One fact that rules a kernel out: what was asked, what it got, what the limit is, and what helps.

    >>> str(Reason("shape", "head_dim", 320, "at most 256 on sm90"))
    'head_dim is 320, at most 256 on sm90'
    """

    kind: str
    what: str
    got: object = None
    limit: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _RANK:
            raise ValueError(f"reason kind is {self.kind!r}, one of {', '.join(KINDS)}")

    @property
    def rank(self) -> int:
        return _RANK[self.kind]

    def __str__(self) -> str:
        text = self.what if self.got is None else f"{self.what} is {self.got}"
        if self.limit:
            text += f", {self.limit}" if self.got is not None else f": {self.limit}"
        return f"{text} ({self.fix})" if self.fix else text
