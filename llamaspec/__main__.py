"""Runs the command line for `python -m llamaspec`."""

from llamaspec import main

main()
