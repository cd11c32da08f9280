"""`python -m shardplan.plan`, the same as `shardplan plan`."""

from shardplan.__main__ import main

raise SystemExit(main("plan"))
