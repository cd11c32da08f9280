"""One decoder of small parts: a family of models is a composition of them.

A family (`shardplan.decoder.families`) reads a config.json into a `DecoderConfig`: a list of layers, each made of
attention, an MLP, a norm and their wiring, and says by rules where a checkpoint holds each parameter. Nothing else is
written for a family. A `Decoder` is a Levanter `LmHeadModel`, so that Levanter's Trainer takes it as it takes its own.
"""
