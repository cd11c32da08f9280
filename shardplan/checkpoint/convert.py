"""Load a checkpoint as planned, and write it out in another format, type or place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardplan.checkpoint.save import CONFIG, new_target, save_levanter, save_pretrained
from shardplan.checkpoint.session import Session, prepare
from shardplan.config import Config
from shardplan.runtime.devices import is_first_process
from shardplan.search.make_plan import with_plan
from shardplan.storage import Folder, read_bytes

BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files of a Hugging Face checkpoint that are copied where they are there."""


def convert(config: Config, to: str) -> str:
    """Load what the configuration says, and write it to the folder `to`; returns a line that says what was done.

    Raises:
        ConfigError: the folder cannot be written to, or holds a checkpoint.
        CheckpointError: the checkpoint is damaged, or cannot be written as it is.
    """
    is_levanter = config.format == "levanter"
    target = new_target(to, is_levanter)  # before what takes long
    session = prepare(*with_plan(config))
    settings = _config_json(session)
    module, program = session.load(session.model.template)
    if is_levanter:
        save_levanter(module, to, settings)
    else:
        others = _others(session.folder) if is_first_process() else {}
        save_pretrained(module, to, settings, program, others)
    return f"{session.folder.ref} written to {target.ref}: {config.format}, {session.plan.workload.param_dtype}"


def _config_json(session: Session) -> dict[str, Any]:
    """The config.json that the model is built from, as it is written."""
    path = session.config.model.config
    text = Path(path).read_bytes() if path is not None else read_bytes(session.folder, CONFIG)
    found: dict[str, Any] = json.loads(text or b"")
    return found


def _others(folder: Folder) -> Mapping[str, bytes]:
    found = {name: read_bytes(folder, name) for name in BESIDE}
    return {name: data for name, data in found.items() if data is not None}
