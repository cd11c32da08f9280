"""What travels between the devices that share experts. All of it runs inside `jax.shard_map`."""
