"""What is known of models: which types are supported, with what, and the facts of released ones.

Nothing here is typed by hand: support follows from the predicates that planning and loading decide by, and facts from
the models that are built of config.json files.
"""
