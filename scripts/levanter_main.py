"""python scripts/levanter_main.py eval_lm | train_lm | ... [the arguments of that script of Levanter]

Runs a script of `levanter.main` with checkpoints streamed by shardplan: every parameter is read straight into the
sharding of `trainer`'s parameter mapping. Losses are right where the mapping shards `vocab`, too. The one line below
that calls shardplan is all that a script needs.
"""

import importlib.util
import runpy
import sys

import shardplan

if __name__ == "__main__":
    if len(sys.argv) < 2 or importlib.util.find_spec(f"levanter.main.{sys.argv[1]}") is None:
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    shardplan.patch_levanter()
    runpy.run_module(f"levanter.main.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
