"""A step as a program: its jaxpr with logical axes on every dimension, what is fused, tasks and live buffers."""
