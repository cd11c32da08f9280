"""The parts of a decoder's layers, each a configuration and the module that it makes."""
