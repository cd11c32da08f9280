"""`python -m shardplan.train`, the same as `shardplan train`."""

from shardplan.__main__ import main

raise SystemExit(main("train"))
