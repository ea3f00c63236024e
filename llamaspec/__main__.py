"""`python -m llamaspec`."""

from llamaspec import main

main()
