"""`python -m rectiformer`: the command line."""

from rectiformer.cli import main

main()
