"""Traced steps: the jaxpr with logical axes on every dimension, fusion, tasks, and live buffers."""
