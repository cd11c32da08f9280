"""`python -m shardplan.eval`, the same as `shardplan eval`."""

from shardplan.__main__ import main

raise SystemExit(main("eval"))
