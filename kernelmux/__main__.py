"""`python -m kernelmux`: the command line."""

from kernelmux.cli import main

main()
