"""Runs each command with its configuration; only `shardplan.__main__` imports commands.

`shardplan plan diff` is in plan/diff.py: a folder for each command that has others below it, a file for every command.
"""
