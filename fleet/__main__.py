"""`python -m fleet` is the same as `warmroute`."""

from fleet.cli import main

main()
