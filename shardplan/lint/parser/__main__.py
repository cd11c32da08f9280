"""`python -m shardplan.lint.parser`: runs a process in which Levanter parses configurations."""

from shardplan.lint.parser.worker import main

main()
