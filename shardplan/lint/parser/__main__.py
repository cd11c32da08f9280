"""`python -m shardplan.lint.parser`: a process in which Levanter parses configurations."""

from shardplan.lint.parser.worker import main

main()
