"""Loads a user's own model: a Levanter configuration class that `model.levanter_class` names."""

import hashlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shardplan.errors import ConfigError, nearest, one_line
from shardplan.model.model_class import LEVANTER, class_of, is_own_class


class OwnModelConfig(Protocol):
    """The methods of a user's configuration class that shardplan needs beyond Levanter's `LmConfig`.

    Sharding requires nothing: a trace of the model finds its logical axes, including the axes of attention. These
    fields are optional:

    - `mask_window: int | None`: number of tokens that a token attends to, if it does not attend to all earlier ones;
    - `logit_soft_cap: float | None`: bound of the logits, applied as `cap * tanh(logits / cap)`;
    - `attn_backend`, `flash_attention_block_size`, `gradient_checkpointing`, as Levanter's configurations have them:
      a plan sets them. Without `attn_backend` the plan's kernel is not used, and Levanter chooses one where it runs.
    """

    @property
    def model_type(self) -> type:
        """The class of the model, a Levanter `LmHeadModel`."""

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> "OwnModelConfig":
        """Make the configuration from a config.json, whose keys are the attributes of `hf_config`."""


def load_own_class(name: str) -> Any:
    """Import the configuration class `package.module:Class`.

    Raises:
        ConfigError: there is no such class, or it has no `from_hf_config`.
    """
    module_name, attribute = _split(name)
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"model.levanter_class {name!r}: cannot import {module_name}: {one_line(error)}") from error
    own_class = getattr(module, attribute, None)
    if not isinstance(own_class, type):
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f"model.levanter_class {name!r}: {module_name} has no class {attribute!r}; {nearest(attribute, classes)}"
        )
    if not hasattr(own_class, "from_hf_config"):
        raise ConfigError(
            f"model.levanter_class {name!r}: {attribute} has no from_hf_config, which makes it from a config.json"
        )
    return own_class


def own_code(hf_config: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 of the Python files in the folder of a user's model; None for models that shardplan knows."""
    name = class_of(hf_config)
    if not is_own_class(name):
        return None
    spec = find_spec(_split(name)[0])
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.glob("*.py")) if spec and spec.origin else ():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _split(name: str) -> tuple[str, str]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"model.levanter_class is {name!r}; it must be package.module:Class, or {LEVANTER} for Levanter's class "
            "for the model type"
        )
    return module_name, attribute
