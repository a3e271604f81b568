"""Where the command line prints: names and brackets as they are, and wide where there is no terminal to fit."""

import sys

from rich.console import Console

out = Console(width=None if sys.stdout.isatty() else 140, markup=False)
err = Console(stderr=True, markup=False)
