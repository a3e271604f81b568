"""Which of several equal values a top-k takes."""

from enum import IntEnum


class TopKTieBreak(IntEnum):
    """Which columns are taken among those equal to the k-th value: any, those at small, or at large indices.

    >>> TopKTieBreak(1)
    <TopKTieBreak.SMALL: 1>
    """

    NONE = 0
    SMALL = 1
    LARGE = 2
