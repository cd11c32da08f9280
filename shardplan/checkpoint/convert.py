"""Load a checkpoint as planned, and write it in another format, dtype or location."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

from shardplan.checkpoint.saving.save import save_levanter, save_pretrained
from shardplan.checkpoint.saving.save_orbax import save_orbax
from shardplan.checkpoint.saving.target import CONFIG
from shardplan.checkpoint.session import Session, prepare
from shardplan.config.command_flags import Format
from shardplan.config.given_plan import load_given_plan
from shardplan.config.plan_config import LoadingConfig
from shardplan.model.bundled_configs import read_config_file
from shardplan.model.huggingface.text_part import read_text_part
from shardplan.model.model_class import LEVANTER
from shardplan.runtime.devices import is_first_process
from shardplan.storage import Folder, read_bytes

COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files of a Hugging Face checkpoint that are copied if they exist."""


def convert_checkpoint(config: LoadingConfig, to: str, file_format: Format) -> str:
    """Load the configured checkpoint, write it to the folder `to`, and return a line that describes what was written.

    Everything is written in `workload.param_dtype`, except that a router is not rounded: its parameters keep their
    stored type if that is wider.

    The folder is checked only after the load, which takes long; call `open_target` first to check it early.

    Raises:
        ConfigError: the folder cannot be written to, or holds a checkpoint.
        CheckpointError: the checkpoint is damaged, or cannot be written in the requested format.
    """
    if file_format == Format.LEVANTER and config.plan is None:  # for its scripts, which have its class
        levanter_model = replace(config.model, levanter_class=config.model.levanter_class or LEVANTER)
        config = replace(config, model=levanter_model)
    session = prepare(*load_given_plan(config))
    config_json = _read_config_json(session)
    module, _ = session.load(session.model.template, is_copy=True)
    match file_format:
        case Format.LEVANTER:
            save_levanter(module, to, config_json)
        case Format.ORBAX:
            save_orbax(module, to, config_json, session.plan)
        case Format.HF:
            files = _read_copied_files(session.folder) if is_first_process() else {}
            save_pretrained(module, to, config_json, extra_files=files)
        case _:
            assert_never(file_format)
    adapter = "" if session.adapter is None else f" with the adapter {session.adapter.ref}"
    return f"{session.folder.ref}{adapter} written to {to}: {file_format}, {session.plan.workload.param_dtype}"


def _read_config_json(session: Session) -> dict[str, Any]:
    """Read the config.json that the model is built from; for a multimodal model, only the text model's part."""
    path = session.config.model.config
    text = read_config_file(path) if path is not None else read_bytes(session.folder, CONFIG)
    config_json: dict[str, Any] = json.loads(text or b"")
    if config_json.get("model_type") in (None, session.model.type):
        return config_json
    return read_text_part(config_json, path or f"{session.folder.ref}/{CONFIG}")[0]


def _read_copied_files(folder: Folder) -> Mapping[str, bytes]:
    files = {name: read_bytes(folder, name) for name in COPIED_FILES}
    return {name: data for name, data in files.items() if data is not None}
