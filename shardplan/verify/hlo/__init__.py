"""Reads compiled HLO modules: instructions, collectives, live buffers, and a modelled step time."""
