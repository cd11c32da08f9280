"""The exchanges between the devices that share experts; all run inside `jax.shard_map`."""
