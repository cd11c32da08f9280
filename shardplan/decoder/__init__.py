"""One decoder for all supported families of models; a family only says how it is composed of the decoder's parts.

The parts (`shardplan.decoder.parts`) are attention, MLPs, norms, rotary embeddings, and the wiring that joins them to a
layer. A family (`shardplan.decoder.families`) is two functions: one reads a config.json into the layers of a
`DecoderConfig`, and one gives the rules (`shardplan.decoder.names`) by which a checkpoint holds the parameters of a
layer. Loading, streaming and saving follow from the rules. A `Decoder` is a Levanter `LmHeadModel`, so Levanter's
Trainer trains it like Levanter's own models.
"""
