"""Reads the keys of a config.json, and refuses keys that nothing understands.

A family takes every key that it understands. Every other key must be known not to change what the model computes;
otherwise it is refused with its name and value. So a release with a new feature is not computed wrong.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

from shardplan.errors import ConfigError
from shardplan.model.axes import MAX_SIZE
from shardplan.model.huggingface.foreign_keys import READ_BY_OTHERS, changes_nothing
from shardplan.model.huggingface.read_quantization import KEYS as QUANTIZATION

logger = logging.getLogger(__name__)
HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
        "_flash_attn_2_enabled", "_name_or_path", "activation_dropout", "architectures", "attention_dropout",
        "attention_probs_dropout_prob", "attn_implementation", "attn_pdrop", "auto_map", "bad_words_ids",
        "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
        "classifier_dropout", "custom_pipelines", "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout",
        "dtype", "early_stopping", "embd_pdrop", "embedding_dropout", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "id2label", "ignore_index",
        "image_end_token_id", "image_start_token_id", "image_token_id", "image_token_index", "init_std",
        "initializer_range", "is_composition", "is_decoder", "is_llama_config", "label2id", "layerdrop",
        "length_penalty", "max_length", "max_sequence_length", "min_length", "model_max_length", "model_type", "n_ctx",
        "n_special", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_image_tokens", "num_labels",
        "num_nextn_predict_layers", "num_return_sequences", "onnx", "output_attentions", "output_hidden_states",
        "output_scores", "pad_token_id", "predict_special_tokens", "prefix", "pretraining_tp", "problem_type",
        "remove_invalid_values", "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict",
        "return_dict_in_generate", "sep_token_id", "seq_length", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params",
        "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
        "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
        "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn", "video_end_token_id",
        "video_start_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id", "vision_token_id",
        "vocab_size",
    }
)  # fmt: skip
"""Keys that do not change what a trained model computes, or that are read outside of families."""


class ConfigKeys:
    """The keys of a config.json; a family takes every key that it understands."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Hold the keys of a file; none of them is taken yet.

        Args:
            values: the content of the file.
            where: name of the file, for messages.
        """
        self.values, self.where = values, where
        self._taken = set[str]()

    def take(self, *names: str, default: Any = None) -> Any:
        """Take keys that mean the same, and return the first value that is given and not null, else the default."""
        self._taken.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def is_null(self, name: str) -> bool:
        """Return whether a key is null, which may mean something else than an absent key."""
        return name in self.values and self.values[name] is None

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Take keys that mean the same, and return their value, an integer from `least` to `MAX_SIZE`.

        Raises:
            ConfigError: the value is missing and has no default, or it is anything else.
        """
        value = self.take(*names, default=default)
        # not isinstance: true is an int to Python
        if type(value) is not int or not least <= value <= MAX_SIZE:
            self.refuse(names[0], value, f"an integer from {least} to {MAX_SIZE}")
        return value

    def integer_or_null(self, name: str, default: int | None) -> int | None:
        """Take a key, and return its value, a positive integer; None if it is null, or absent without a default.

        Raises:
            ConfigError: the value is anything else.
        """
        if self.take(name, default=default) is None or self.is_null(name):
            return None
        return self.integer(name, default=default)

    def number_or_null(self, name: str, default: float | None) -> float | None:
        """Take a key, and return its value, a positive number; None if it is null, or absent without a default.

        Raises:
            ConfigError: the value is anything else.
        """
        if self.take(name, default=default) is None or self.is_null(name):
            return None
        return self.number(name, default=default)

    def number(self, *names: str, default: float | None = None) -> float:
        """Take keys that mean the same, and return their value, a positive number.

        Raises:
            ConfigError: the value is missing and has no default, or it is anything else.
        """
        value = self.take(*names, default=default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(names[0], value, "a positive number")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """Take keys that mean the same, and return their value, true or false.

        Raises:
            ConfigError: the value is anything else.
        """
        value = self.take(*names, default=default)
        if not isinstance(value, bool):
            self.refuse(names[0], value, "true or false")
        return value

    def choice[T](self, *names: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Take keys that mean the same, and return the choice that their value names.

        Raises:
            ConfigError: the value is missing and has no default, or it names none of the choices.
        """
        value = self.take(*names, default=default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(names[0], value, f"one of {', '.join(choices)}")
        return choices[value]

    def only(self, name: str, values: Sequence[Any]) -> None:
        """Take a key, and check that it is absent, null, or one of the values that the decoder supports.

        Raises:
            ConfigError: the key has another value.
        """
        value = self.take(name)
        if value is not None and value not in values:
            self.refuse(name, value, " or ".join(map(repr, values)))

    def finish(self) -> None:
        """Check that every key was taken, or is known not to change what the model computes.

        A warning names the keys that transformers reads in other model types, but ignores in this one.

        Raises:
            ConfigError: a key that was not taken may change what the model computes.
        """
        left, unread = [], []
        for name, value in self.values.items():
            is_known = name in self._taken or name in (*HARMLESS, *QUANTIZATION) or changes_nothing(name, self.values)
            if name in READ_BY_OTHERS and not is_known and value:
                unread.append(f"{name} {value!r}")
            elif not is_known and name not in READ_BY_OTHERS and value is not None:
                left.append(name)
        if unread:
            kind = self.values.get("model_type")
            _say(f"{self.where}: {', '.join(unread)}: ignored, as transformers does not read it in a {kind!r}")
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


@cache  # a command reads the file more than once
def _say(message: str) -> None:
    logger.warning("%s", message)
