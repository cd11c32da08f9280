"""The configuration that the arguments of an lm_eval model describe (`--model_args`)."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardplan.config import parse_config
from shardplan.config.given_plan import load_given_plan
from shardplan.config.keys import keys_of
from shardplan.config.plan_config import LoadingConfig
from shardplan.errors import ConfigError, nearest
from shardplan.eval.harness.hf_arguments import (
    AUTO_DTYPE,
    DTYPE_KEYS,
    HF_ARGUMENTS,
    resolve_auto_dtype,
    translate,
)
from shardplan.hardware import parse_slice
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import AUTO_BATCH, Workload, raise_first
from shardplan.positions.sequence_layout import KERNEL_BLOCK

OWN_ARGUMENTS = ("config", "max_length", "add_bos_token", "prefix_token_id")
"""Arguments of the model that are not configuration keys."""


def read_settings(
    config: str | None, max_length: int | None, overrides: Mapping[str, Any]
) -> tuple[LoadingConfig, Plan | None]:
    """Return the configuration of a run, with a workload for requests, and the Plan that it names, if any.

    By default, the batch is the fastest one, and a row has `max_length` + 1 tokens, rounded up to complete blocks of
    the attention kernel.

    >>> arguments = {"pretrained": "org/model", "hardware.slice": "v5e-8"}
    >>> config, plan = read_settings(None, max_length=1000, overrides=arguments)
    >>> config.model.ref, config.workload.kind, config.workload.position, plan
    ('org/model', 'score', 1024, None)

    Args:
        config: path of a YAML file.
        max_length: most tokens that the model is given; None for one less than the tokens of a row.
        overrides: keys of the configuration, by dotted name or as nested mappings, and arguments of `hf`.

    Raises:
        ConfigError: the file or a key cannot be used, or contradicts the workload for requests.
    """
    keys, given = keys_of(LoadingConfig), translate(overrides)
    for name in given:
        if name not in keys:
            valid = [*keys, *OWN_ARGUMENTS, *HF_ARGUMENTS]
            raise ConfigError(f"model_args: unknown key {name!r}; {nearest(name, valid)}")
    open_types = [key for key in DTYPE_KEYS if given.get(key) == AUTO_DTYPE]
    for key in open_types:
        del given[key]
    argv = [f"--config={config}"] if config is not None else []
    for name, value in given.items():
        argv += [f"--{name}={_text(each)}" for each in (value if isinstance(value, (list, tuple)) else [value])]
    try:
        parsed = parse_config(argv, LoadingConfig)
        if open_types:
            dtype = resolve_auto_dtype(parsed.model.ref)
            parsed = parse_config([*argv, *(f"--{key}={dtype}" for key in open_types)], LoadingConfig)
        parsed, plan = load_given_plan(parsed)
    except ConfigError as error:
        raise ConfigError(str(error).replace("command line:", "model_args:", 1)) from error
    if plan is None:
        parsed = replace(parsed, workload=_workload(parsed, max_length))
    elif not plan.workload.is_scoring or plan.workload.window is None or plan.workload.temperature != 1:
        raise ConfigError(
            f"plan {parsed.plan} is not for packed requests; plan with --workload.kind score, and --workload.window as "
            "large as --workload.position"
        )
    position = parsed.workload.position
    if max_length is not None and not 1 <= max_length < position:
        raise ConfigError(
            f"max_length is {max_length}, and workload.position {position}; it must be 1 to {position - 1}, because "
            "the token that is predicted last is in the row, too"
        )
    return parsed, plan


def _workload(config: LoadingConfig, max_length: int | None) -> Workload:
    """Return the workload that scores packed requests: scores without top k, in windows of any length."""
    work, given = config.workload, config.given
    position = work.position
    if "workload.position" not in given and max_length is not None:
        # attention on TPUs needs the kernel
        block = 1 if parse_slice(config.hardware.slice).is_cpu else KERNEL_BLOCK
        position = -(-(max_length + 1) // block) * block
    batch = work.batch if "workload.batch" in given else AUTO_BATCH
    # a window as long as the row: planned like packed windows, whose positions are not sharded
    changed = replace(work, kind="score", top_k=0, temperature=1.0, batch=batch, position=position, window=position)
    for key in ("kind", "temperature", "window"):
        configured, needed = getattr(work, key), getattr(changed, key)
        if f"workload.{key}" in given and configured not in (None, needed):
            raise ConfigError(f"workload.{key} is {configured}, lm_eval needs {needed}; leave it out")
    raise_first(changed.problems())
    return changed


def _text(value: Any) -> str:
    """Format a value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
