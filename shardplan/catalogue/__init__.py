"""Facts about models: the supported features of every model type, and the size and layers of every released model.

No table is kept by hand. Features follow from the predicates that planning and loading use, and facts from models that
are built from their config.json files.
"""
