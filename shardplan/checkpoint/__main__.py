"""`python -m shardplan.checkpoint`, the same as `shardplan checkpoint`."""

from shardplan.__main__ import main

raise SystemExit(main("checkpoint"))
