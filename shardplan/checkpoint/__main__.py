"""`python -m shardplan.checkpoint` runs `shardplan checkpoint`."""

from shardplan.__main__ import main

raise SystemExit(main("checkpoint"))
