"""`python -m rectiformer`: the command line."""

from rectiformer.cli.leaving import start

start()
