"""`python -m shardplan.verify`, the same as `shardplan verify`."""

from shardplan.__main__ import main

raise SystemExit(main("verify"))
