"""Finds Levanter's program for a configuration file, by the keys of its sections.

Each program (`python -m levanter.main.train_lm`, ...) parses its file into a configuration class of its own, so that a
key of one program stops another. The table holds the keys of every version of Levanter that `shardplan` knows. Imports
no JAX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RUN = ("data", "model", "trainer")
_EXPORT = ("hf_save_path", "hf_save_steps", "hf_upload")
_ADAPTER_EXPORT = ("merged_hf_save_path", "merged_hf_upload", "peft_hf_upload", "peft_save_path")
_TRAINING = (*_RUN, *_EXPORT, "data_seed", "initialize_from_hf", "optimizer", "use_hf_model_config")
_CHAT = ("dataset_type", "input_role", "max_seq_len", "messages_field", "model_name_or_path", "output_role",
         "reinit_embeddings", "reinit_lm_head", "reinit_tokens", "supervised_data", "tokenizer")  # fmt: skip

TRAINING_KEYS = (
    "allow_partial_checkpoint", "checkpointer", "crash_on_inf", "crash_on_nan", "initialize_from", "load_checkpoint",
    "load_checkpoint_path", "model_averaging", "num_train_steps", "steps_per_eval",
)  # fmt: skip
"""Keys of the trainer section that affect training alone."""


@dataclass(frozen=True)
class LevanterProgram:
    """One of Levanter's programs, and the sections and keys of its configuration."""

    name: str
    """Name of the program's module in `levanter.main`."""
    config_class: str
    kind: str
    """The kind of workload by which shardplan predicts the program's time and memory."""
    keys: frozenset[str]
    """Sections and keys at the top of the program's file, in any version."""
    length_keys: tuple[str, ...] = ()
    """Keys at the top of the file for the tokens of a sequence."""
    default_length: int | None = None
    """Tokens of a sequence if the file has none of `length_keys`; None for the model's number of positions."""

    @property
    def module(self) -> str:
        """Full name of the program's module, for an import."""
        return f"levanter.main.{self.name}"


def _program(name: str, config_class: str, kind: str, *keys: str, **length: Any) -> LevanterProgram:
    return LevanterProgram(name, config_class, kind, frozenset(keys), **length)


PROGRAMS = (
    _program(
        "train_lm", "TrainLmConfig", "train", *_TRAINING, *_ADAPTER_EXPORT, "adapter", "epoch", "eval_harness",
        "eval_harness_steps", "hf_generation_eos_token_ids", "hf_save_dtype", "initialize_from_checkpoint_path",
        "initialize_model_from_checkpoint_path", "labeled_eval", "log_entropy", "pad_tokenizer_to_match_model",
        "train_seq_len", "z_loss_weight", length_keys=("train_seq_len",),
    ),
    _program(
        "eval_lm", "EvalLmConfig", "eval", *_RUN, "checkpoint_path", "eval_on_train", "hf_checkpoint", "log_entropy",
        "log_param_stats", "log_top2_gap", "max_eval_length", length_keys=("max_eval_length",), default_length=2048,
    ),
    _program(
        "sample_lm", "SampleLmConfig", "prefill", "checkpoint_path", "engine", "hf_checkpoint",
        "log_kernel_jaxprs_path", "max_new_tokens", "model", "n_generations", "n_rounds", "profile", "prompts", "seed",
        "stop_sequence", "temperature", "tokenizer", "trainer",
    ),
    _program(
        "lora_lm", "LoraLmConfig", "train", "data", "hf_save_steps", "initialize_from_hf", "lora", "max_train_length",
        "optimizer", "train_seq_len", "trainer", "trust_remote_code", *_ADAPTER_EXPORT,
        length_keys=("train_seq_len", "max_train_length"), default_length=4096,
    ),
    _program(
        "train_dpo", "TrainDpoConfig", "train", *_TRAINING, *_ADAPTER_EXPORT, "adapter", "beta",
        "hf_generation_eos_token_ids", "hf_save_dtype", "initialize_from_checkpoint_path", "lm_validation_data",
        "lm_validation_prefix", "reference", "reference_eval_cache", "run_initial_eval", "scheduled_eval_steps",
        "train_seq_len", "validation_split_fraction", length_keys=("train_seq_len",),
    ),
    _program(
        "lora_dpo", "LoraDpoConfig", "train", "beta", "data", "data_seed", "hf_save_steps", "initialize_from_hf",
        "lora", "optimizer", "reference_eval_cache", "train_seq_len", "trainer", "trust_remote_code",
        "use_hf_model_config", "validation_split_fraction", *_ADAPTER_EXPORT, length_keys=("train_seq_len",),
    ),
    _program(
        "viz_logprobs", "VizLmConfig", "eval", *_RUN, "checkpoint_is_hf", "checkpoint_path", "comparison_is_hf",
        "comparison_model_path", "data_seed", "max_eval_length", "num_docs", "path", length_keys=("max_eval_length",),
        default_length=4096,
    ),
    _program(
        "sft", "SFTConfig", "train", *_CHAT, *_EXPORT, "chat_train_urls", "data_seed", "epoch", "initialize_from_hf",
        "model", "optimizer", "trainer", length_keys=("max_seq_len",),
    ),
    _program(
        "sft_mixture", "SFTMixtureConfig", "train", *_CHAT, *_EXPORT, "data_seed", "initialize_from_hf",
        "mixture_block_size", "mixture_weights", "model", "optimizer", "stop_strategy", "trainer",
        length_keys=("max_seq_len",),
    ),
)  # fmt: skip
"""Levanter's programs that train, evaluate or sample a language model, most common first."""


@dataclass(frozen=True)
class ProgramChoice:
    """The program chosen for a file."""

    program: LevanterProgram
    evidence: tuple[str, ...]
    """Keys in the file that only programs of this kind have; empty if none is there and the kind is assumed."""

    def position(self, sections: Mapping[str, Any]) -> int | None:
        """Return a sequence's tokens by the program's own key or its default; None if the model section decides."""
        for key in self.program.length_keys:
            value = sections.get(key)
            if type(value) is int and value > 0:
                return value
        return self.program.default_length if self.evidence else None


def choose_program(
    sections: Mapping[str, Any], kind: str = "eval", is_kind_given: bool = False, inside: Sequence[str] = ()
) -> ProgramChoice:
    """Choose the program that has the most keys in common with the file.

    Args:
        kind: the kind of workload to choose if the keys fit programs of several kinds.
        is_kind_given: whether the user requests this kind, so that programs of other kinds are excluded.
        inside: keys of the sections that contain `sections`, as in configurations for pods.

    >>> choose_program({"trainer": {}, "optimizer": {}}).program.name
    'train_lm'
    """
    kind = kind if kind in {program.kind for program in PROGRAMS} else "eval"
    trains = [*_training_keys(sections), *(name for name in inside if "train" in name)]
    trains_as_given = kind == "train"
    candidates = [each for each in PROGRAMS if not is_kind_given or (each.kind == "train") == trains_as_given]
    most = max(_fitting(program, sections) for program in candidates)
    best = [program for program in candidates if _fitting(program, sections) == most]
    if trains and any(program.kind == "train" for program in best):
        best = [program for program in best if program.kind == "train"]
    if len({program.kind for program in best}) > 1:
        return ProgramChoice(next((program for program in best if program.kind == kind), best[0]), ())
    others = {key for program in PROGRAMS if program.kind != best[0].kind for key in program.keys}
    own = [str(key) for key in sections if key in best[0].keys and key not in others]
    evidence = (*own, *(trains if best[0].kind == "train" else ()))
    return ProgramChoice(best[0], evidence or (f"workload.kind {kind}",))


def _training_keys(sections: Mapping[str, Any]) -> list[str]:
    """List the dotted keys of the trainer section that affect only training."""
    trainer = sections.get("trainer")
    if not isinstance(trainer, Mapping):
        return []
    keys = [f"trainer.{key}" for key in TRAINING_KEYS if key in trainer]
    is_schedule = isinstance(trainer.get("train_batch_size"), list)
    return [*keys, *(["trainer.train_batch_size"] if is_schedule else [])]


def _fitting(program: LevanterProgram, sections: Mapping[str, Any]) -> int:
    return sum(key in program.keys for key in sections)
