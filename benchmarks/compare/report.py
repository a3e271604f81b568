"""Rows as they come, appended to a JSON Lines file at once, and the summary at the end."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = ("equal", "built", "explained", "flashinfer refuses", "MISSING", "DIFFERENT", "not run")
WIDTH = 300  # of a verdict in the summary; the table and the file have all of it


def kind(row: dict[str, Any]) -> str:
    return str(row["verdict"]).split(":")[0]


def line(row: dict[str, Any]) -> str:
    numbers = [f"{row[k]:9.2e}" if row[k] is not None else f"{'-':>9}" for k in ("max_abs", "rel_l2")]
    share = f"{row['differing']:6.1%}" if row["differing"] is not None else f"{'-':>6}"
    return f"{row['family']:12} {row['function']:44} {row['features']:52} {' '.join(numbers)} {share}  {row['verdict']}"


HEADER = f"{'family':12} {'function':44} {'features':52} {'max abs':>9} {'rel L2':>9} {'differ':>6}  verdict"


class Report:
    """Prints and stores each row. For distributions max abs is the total variation distance, rel L2 chi-square's z."""

    def __init__(self, file: str | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.file = Path(file) if file else None
        print(HEADER, flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self.file:
            with self.file.open("a") as out:
                out.write(json.dumps(row) + "\n")

    def summary(self) -> int:
        """Print what is not equal, the slowest builds, and counts per family; the number of DIFFERENT rows."""
        order = sorted(self.rows, key=lambda r: (KINDS.index(kind(r)), r["family"], r["function"], r["features"]))
        print("\nNot equal:")
        for row in order:
            if kind(row) not in ("equal", "built", "not run"):
                print(f"  {row['family']} {row['function']} [{row['features']}]: {row['verdict'][:WIDTH]}")
        first: dict[str, float] = {}
        for row in self.rows:
            first[row["module"]] = max(first.get(row["module"], 0.0), row["theirs_s"])
        slow = sorted(first.items(), key=lambda item: -item[1])[:12]
        print("\nSlowest builds: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in slow))
        for family in dict.fromkeys(r["family"] for r in self.rows):
            counts = Counter(kind(r) for r in self.rows if r["family"] == family)
            print(f"{family:12} " + ", ".join(f"{counts[k]} {k}" for k in KINDS if counts[k]))
        sys.stdout.flush()
        return sum(kind(r) == "DIFFERENT" for r in self.rows)


def show(file: str) -> None:
    """Print a stored table, sorted; of a case that was run several times, the last row."""
    last = {}
    for text in Path(file).read_text().splitlines():
        row = json.loads(text)
        last[row["family"], row["function"], row["features"]] = row
    print(HEADER)
    for key in sorted(last):
        print(line(last[key]))
