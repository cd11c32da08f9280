"""Load a checkpoint as planned, and write it out in another format, type or place."""

import json

from shardplan.checkpoint.load import validated
from shardplan.checkpoint.planned import start
from shardplan.checkpoint.save import CONFIG, save_levanter, save_pretrained
from shardplan.config import Config
from shardplan.plan.planner import with_plan
from shardplan.storage import read_bytes

BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Files of a Hugging Face checkpoint that are copied where they are there."""


def convert(config: Config) -> str:
    """Do what the configuration says; returns a line that says what was done.

    Raises:
        ConfigError: the output cannot be written, or is there.
        CheckpointError: the checkpoint is damaged, or cannot be written as it is.
    """
    planned = start(*with_plan(config))
    module = planned.load(planned.model.template)
    if config.format == "levanter":
        save_levanter(module, config.output)
    else:
        _, program = validated(planned.model.template, planned.folder)
        settings = json.loads(read_bytes(planned.folder, CONFIG) or "{}")
        found = {name: read_bytes(planned.folder, name) for name in BESIDE}
        others = {name: data for name, data in found.items() if data is not None}
        save_pretrained(module, config.output, settings, program, others)
    return f"{planned.folder.ref} written to {config.output}: {config.format}, {planned.plan.workload.param_dtype}"
