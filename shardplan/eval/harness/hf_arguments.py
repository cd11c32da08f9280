"""Translates arguments of lm_eval's `hf` model to configuration keys; names those that shardplan does not support.

| arguments of `hf` | here |
|---|---|
| `pretrained`, `revision`, `dtype` | `model.ref`, and both types of the workload |
| `peft` | `model.adapter` |
| `tokenizer`, `chat_template_args`, `enable_thinking` | as in `hf` |
| `WITHOUT_EFFECT` | accepted with a warning: the plan or the program decides what they are for |
| `REFUSED` | an error that names what to do |
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardplan.errors import ConfigError
from shardplan.model.huggingface.text_part import TEXT_KEYS
from shardplan.plan.serialization import flatten
from shardplan.plan.workload.dtypes import DTYPES
from shardplan.storage import Folder, is_local, open_folder, read_bytes

WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("parallelize", "tp_plan", "device_map", "max_memory_per_gpu", "max_cpu_memory", "offload_folder"),
        "the plan decides how the model is sharded; see mesh.model and mesh.data",
    ),
    "attn_implementation": "the plan decides how attention is computed",
    "logits_cache": "requests that begin alike are computed once, always",
    "low_cpu_mem_usage": "weights are streamed, always",
    "think_end_token": "it is for generated text",
    "truncation": "it is for generated text; what is too long is truncated from the left, as in hf",
    "trust_remote_code": "code of a checkpoint is never run; for a model of your own set model.levanter_class",
    "use_cache": "nothing is generated",
}
"""Argument of `hf` -> why it has no effect here."""
REFUSED = {
    "delta": "merge the delta with the model, and name the merged folder",
    **dict.fromkeys(
        ("autogptq", "gptqmodel", "gguf_file", "load_in_4bit", "load_in_8bit", "quantization_config"),
        "quantized weights are not supported; name a checkpoint in bfloat16, float16 or float32",
    ),
    "mixed_precision_dtype": "set workload.param_dtype and workload.compute_dtype",
    "subfolder": "name the folder itself as model.ref",
    "tensor_parallel_size": "set mesh.model",
}
"""Argument of `hf`, or of `vllm`, -> what to do instead."""
ONLY_VALUES = {
    "backend": (("default", "causal"), "only decoder models are supported"),
    "softmax_dtype": (("float32",), "scores are computed in float32"),
    "use_fast_tokenizer": ((True,), "the tokenizer is the fast one where there is one"),
}
"""Argument of `hf` -> the only values that have the same meaning here, and why."""
KEY_SYNONYMS = ("pretrained", "revision", "dtype", "peft")
"""Arguments that are other names of configuration keys."""
TEXT_ARGUMENTS = ("tokenizer", "chat_template_args", "enable_thinking")
"""Arguments that decide how texts become tokens."""
HF_ARGUMENTS = (*KEY_SYNONYMS, *TEXT_ARGUMENTS, *WITHOUT_EFFECT, *REFUSED, *ONLY_VALUES)
"""All arguments of `hf` that shardplan knows."""
DTYPE_KEYS = ("workload.param_dtype", "workload.compute_dtype")
"""Keys that the argument `dtype` sets."""
DTYPE_SYNONYMS = {"float": "float32", "half": "float16"}
"""Names of dtypes in torch -> names in shardplan."""
AUTO_DTYPE = "auto"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextArguments:
    """Arguments that decide how texts become tokens."""

    tokenizer: str | None = None
    """A folder or repository whose tokenizer is used; None for the checkpoint's tokenizer."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the chat template."""


def translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translate lm_eval's arguments to configuration keys; arguments that are keys stay unchanged.

    Arguments that `read_text_arguments` reads are left out. The dtype `auto` is left to `resolve_auto_dtype`, because
    the checkpoint may be named in a file.

    Example:
        >>> translate({"pretrained": "org/model", "dtype": "float32"})
        {'model.ref': 'org/model', 'workload.param_dtype': 'float32', 'workload.compute_dtype': 'float32'}

    Raises:
        ConfigError: an argument of `hf` cannot be used here, or contradicts a key.
    """
    given = {name: value for name, value in arguments.items() if name not in TEXT_ARGUMENTS}
    ref, revision, dtype, adapter = (given.pop(name, None) for name in KEY_SYNONYMS)
    for name in sorted({*given} & {*REFUSED, *ONLY_VALUES, *WITHOUT_EFFECT}):
        _check_argument(name, given.pop(name))
    keys = flatten(given)
    if ref is not None:
        _set(keys, "model.ref", str(ref), f"pretrained={ref}")
    if adapter:
        _set(keys, "model.adapter", str(adapter), f"peft={adapter}")
    if revision is not None:
        _set_revision(keys, str(revision))
    if dtype is not None:
        name = _dtype_name(dtype)
        if name not in (*DTYPES, AUTO_DTYPE):
            raise ConfigError(f"model_args: dtype is {name!r}; valid: {', '.join([AUTO_DTYPE, *DTYPES])}")
        for key in DTYPE_KEYS:
            _set(keys, key, name, f"dtype={name}")
    return keys


def _check_argument(name: str, value: Any) -> None:
    """Check an argument of `hf` that sets no key: refuse it, or warn that it has no effect."""
    if value is None or value is False or value == "":  # as if it were left out
        return
    if name in REFUSED:
        raise ConfigError(f"model_args: {name} cannot be used; {REFUSED[name]}")
    if name in WITHOUT_EFFECT:
        logger.warning("%s is not used: %s", name, WITHOUT_EFFECT[name])
        return
    valid, why = ONLY_VALUES[name]
    if value not in valid and _dtype_name(value) not in valid:
        raise ConfigError(f"model_args: {name} is {value!r}; {why}, leave it out")


def read_text_arguments(arguments: Mapping[str, Any]) -> TextArguments:
    """Return the arguments that decide how texts become tokens.

    >>> read_text_arguments({"chat_template_args": '{"reasoning_effort": "low"}', "enable_thinking": False})
    TextArguments(tokenizer=None, chat_template_args={'reasoning_effort': 'low', 'enable_thinking': False})

    Raises:
        ConfigError: a variable of the chat template does not exist, or is for generated text.
    """
    tokenizer, template, thinking = map(arguments.get, TEXT_ARGUMENTS)
    if isinstance(template, str):
        try:
            template = json.loads(template)
        except ValueError:
            template = None
        if not isinstance(template, dict):
            raise ConfigError(
                'model_args: chat_template_args must be a JSON object, such as {"enable_thinking": false}'
            )
    values = dict(template or {})
    if thinking is not None:
        values["enable_thinking"] = thinking
    if values.get("enable_thinking"):
        raise ConfigError(
            "model_args: enable_thinking is true, and only generated text has thoughts; set it to false or leave it out"
        )
    return TextArguments(None if tokenizer is None else str(tokenizer), values)


def resolve_auto_dtype(ref: str) -> str:
    """Return the dtype in a checkpoint's config.json, which lm_eval's `hf` uses for `dtype=auto`.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text('{"torch_dtype": "half"}')
    ...     resolve_auto_dtype(folder)
    'float16'

    Raises:
        ConfigError: config.json names no dtype, or an unsupported one.
    """
    name = _stored_dtype(open_folder(ref)) if ref else None
    if name in DTYPES:
        return str(name)
    problem = f"is {name!r}" if name else "is not there"
    raise ConfigError(
        f"model_args: dtype is auto, and the dtype in the config.json of {ref or 'no checkpoint'} {problem}; set dtype "
        f"to one of {', '.join(DTYPES)}"
    )


def _stored_dtype(folder: Folder) -> str | None:
    """Return the type of weights that a config.json gives."""
    try:
        values = json.loads(read_bytes(folder, "config.json") or b"{}")
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    inner: dict[str, Any] = next((values[key] for key in TEXT_KEYS if isinstance(values.get(key), dict)), {})
    name = values.get("dtype") or values.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return None if name is None else _dtype_name(name)


def _set(keys: dict[str, Any], key: str, value: Any, argument: str) -> None:
    """Set the key that an argument stands for."""
    if keys.setdefault(key, value) != value:
        raise ConfigError(f"model_args: {argument} contradicts {key}={keys[key]}; leave one of them out")


def _set_revision(keys: dict[str, Any], revision: str) -> None:
    """Add a revision to the checkpoint's reference, except the default `main`."""
    ref = str(keys.get("model.ref") or "")
    name, separator, own = ref.partition("@")
    if separator and own != revision:
        raise ConfigError(f"model_args: revision={revision} contradicts {ref}; leave one of them out")
    if revision == "main" or separator:
        return
    if not ref:
        raise ConfigError(f"model_args: revision is {revision}, and pretrained is not set; set pretrained")
    if is_local(ref) or "://" in ref.removeprefix("hf://"):
        raise ConfigError(f"model_args: revision is {revision}, and {ref} is no repository of the hub; leave it out")
    keys["model.ref"] = f"{name}@{revision}"


def _dtype_name(value: Any) -> str:
    """Return the name of a dtype that is given as a torch or NumPy object, or as a name."""
    name = str(value if isinstance(value, str) else getattr(value, "__name__", value)).removeprefix("torch.")
    return DTYPE_SYNONYMS.get(name, name)
