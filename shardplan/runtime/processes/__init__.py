"""Connects the processes of a run, makes them agree on values, and detects stuck or lost ones.

| module | what it has |
|---|---|
| hub/messages.py | the lines of JSON that processes and hub exchange |
| hub/hub.py | what the hub answers to each of them; without sockets or clocks |
| hub/hub_process.py | the process of the hub: its sockets, and JAX's coordination service |
| watch/ | what a process is doing, and where it is stuck |
| link.py | a process's connection to the hub |
| group.py | what the rest of shardplan uses: values that all processes exchange or agree on |
"""
