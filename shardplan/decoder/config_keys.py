"""Reads the keys of a config.json, so that none of them is ignored in silence.

A family takes every key that it understands. What is left over afterwards either says nothing about what the model
computes, or is refused by its name and value.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shardplan.errors import ConfigError
from shardplan.model.axes import MAX_SIZE
from shardplan.model.huggingface.foreign_keys import changes_nothing

HARMLESS = frozenset(
    {
        "_name_or_path", "activation_dropout", "architectures", "attention_dropout", "attention_probs_dropout_prob",
        "attn_pdrop", "auto_map", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
        "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "dropout", "dtype", "embd_pdrop",
        "embedding_dropout", "eos_token_id", "finetuning_task", "gradient_checkpointing", "hidden_dropout",
        "hidden_dropout_prob", "id2label", "init_std", "initializer_range", "is_decoder", "is_llama_config", "label2id",
        "layerdrop", "model_max_length", "model_type", "n_ctx", "n_special", "num_nextn_predict_layers",
        "output_attentions", "output_hidden_states", "pad_token_id", "predict_special_tokens", "prefix",
        "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout", "return_dict", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
        "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
        "transformers_version", "unk_token_id", "use_bfloat16", "use_cache", "vocab_size",
    }
)  # fmt: skip
"""Keys that say nothing about what a trained model computes, or that are read before its family."""


class ConfigKeys:
    """The keys of a config.json; a family takes those that it understands."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Hold the keys of a file, none of which is taken yet.

        Args:
            values: the content of the file.
            where: name of the file, for messages.
        """
        self.values, self.where = values, where
        self._taken = set[str]()

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of some keys that is given and not null, else the default."""
        self._taken.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def is_null(self, name: str) -> bool:
        """Return whether a key is given as null, which may say something else than its absence."""
        return name in self.values and self.values[name] is None

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer from `least` to `MAX_SIZE`.

        Raises:
            ConfigError: it is missing and has no default, or is something else.
        """
        value = self.take(*names, default=default)
        if type(value) is not int or not least <= value <= MAX_SIZE:
            self.refuse(names[0], value, f"an integer from {least} to {MAX_SIZE}")
        return value

    def integer_or_null(self, name: str, default: int | None) -> int | None:
        """Return a positive integer; None where the file says null, or where it says nothing and that is the default.

        Raises:
            ConfigError: it is something else.
        """
        if self.take(name, default=default) is None or self.is_null(name):
            return None
        return self.integer(name, default=default)

    def number_or_null(self, name: str, default: float | None) -> float | None:
        """Return a positive number; None where the file says null, or where it says nothing and that is the default.

        Raises:
            ConfigError: it is something else.
        """
        if self.take(name, default=default) is None or self.is_null(name):
            return None
        return self.number(name, default=default)

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a positive number.

        Raises:
            ConfigError: it is missing and has no default, or is something else.
        """
        value = self.take(*names, default=default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(names[0], value, "a positive number")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ConfigError: it is something else.
        """
        value = self.take(*names, default=default)
        if not isinstance(value, bool):
            self.refuse(names[0], value, "true or false")
        return value

    def choice[T](self, *names: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Return what a name stands for.

        Raises:
            ConfigError: it is missing and has no default, or is none of the choices.
        """
        value = self.take(*names, default=default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(names[0], value, f"one of {', '.join(choices)}")
        return choices[value]

    def only(self, name: str, values: Sequence[Any]) -> None:
        """Check that a key has one of the values that the decoder computes, or is absent.

        Raises:
            ConfigError: it has another value.
        """
        value = self.take(name)
        if value is not None and value not in values:
            self.refuse(name, value, " or ".join(map(repr, values)))

    def finish(self) -> None:
        """Check that every key was taken, or says nothing about what the model computes.

        Raises:
            ConfigError: a key is left over that may change what the model computes.
        """
        left = []
        for name, value in self.values.items():
            is_known = name in self._taken or name in HARMLESS or changes_nothing(name, self.values)
            if not is_known and value is not None:
                left.append(name)
        if left:
            named = ", ".join(f"{name} {self.values[name]!r}" for name in left[:3])
            kind = self.values.get("model_type")
            raise ConfigError(
                f"{self.where}: {named}: a {kind!r} has no such key, and the model may compute something else than "
                "planned; remove it if it changes nothing"
            )

    def refuse(self, name: str, value: Any, expected: str) -> NoReturn:
        absent = "is null" if self.is_null(name) else "is missing"
        problem = absent if value is None else f"is {value!r}"
        raise ConfigError(f"{self.where}: {name} {problem}; it must be {expected}")
