"""The cost model: time and memory per device of a traced step under a sharding assignment."""
