"""The parts of a decoder's layers; each part has a configuration, whose `init` makes the Equinox module."""
