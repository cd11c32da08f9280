"""`save_pretrained` of Levanter's converter, with the weights written as shardplan writes them.

Levanter's own takes of every array the shard of the first device, if the mesh has Auto axes, and writes it as if it
were the array. Signature, files and behaviour are those of Levanter's method: a checkpoint that the folder holds is
replaced, as a training that was resumed expects when it saves a step once more.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter
from levanter.compat.hf_checkpoints import RepoRef, _save_tokenizer_pretrained

from shardplan.checkpoint.levanter_converter.config import make_hf_config
from shardplan.checkpoint.levanter_converter.upload import find_repository, make_repository, upload_checkpoint
from shardplan.checkpoint.saving.save import save_pretrained
from shardplan.checkpoint.saving.target import CONFIG
from shardplan.checkpoint.saving.written_config import count_bytes_by_dtype
from shardplan.errors import ConfigError, one_line
from shardplan.runtime.processes.group import open_process_group

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum bytes of a file, Levanter's default."""
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Endings of weight files, which are not copied from a reference checkpoint."""


class SavingConverter(LevanterConverter):
    """Levanter's converter with `save_pretrained` replaced."""

    def save_pretrained(
        self,
        model: Any,
        path: Any,
        upload_to_hf: bool | str | RepoRef = False,
        save_reference_code: bool | None = None,
        save_tokenizer: bool = True,
        max_shard_size: int = MAX_SHARD_BYTES,
        export_host_budget_bytes: int | None = None,
        max_concurrent_shards: int | None = None,
        save_feature_extractor: bool = False,
        dtype: Any = None,
        generation_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        **hf_upload_kwargs: Any,
    ) -> None:
        """Write `model` as a Hugging Face checkpoint that replaces an existing one; every process calls this.

        Args:
            model: a Levanter model, sharded in any way.
            path: folder, local or of an object store; the same folder for all processes.
            upload_to_hf: repository of the hub to upload the files to, which is created if it does not exist; True for
                the repository of the reference checkpoint.
            save_reference_code: whether to copy the files of the reference checkpoint other than weights; default: only
                if its configuration is not a class of transformers.
            save_tokenizer: whether to write the files of the tokenizer.
            max_shard_size: most bytes of a file that has more than one tensor.
            export_host_budget_bytes: no effect: a process holds a few tensors at a time.
            max_concurrent_shards: no effect: every process writes one file at a time.
            save_feature_extractor: whether to write the files of the feature extractor.
            dtype: type that floating-point arrays are cast to, except arrays of the decoder's routers with a wider
                type.
            generation_config: content of generation_config.json.
            chat_template: replaces the tokenizer's.
            hf_upload_kwargs: further arguments of `huggingface_hub.upload_folder`.

        Raises:
            ConfigError: the folder cannot be written to, the upload fails, or a value is too large for `dtype`.
            CheckpointError: a tensor was not written as it should be.
        """
        del export_host_budget_bytes, max_concurrent_shards
        repository = find_repository(self, upload_to_hf)
        with_code = self._resolve_save_reference_code(save_reference_code)

        def write_beside(folder: str) -> None:
            if with_code:
                self._save_code_local(folder)
            if save_tokenizer:
                _save_tokenizer_pretrained(self.tokenizer, folder, chat_template=chat_template)
            if save_feature_extractor and self.feature_extractor is not None:
                self.feature_extractor.save_pretrained(folder)

        config = make_hf_config(self, model)
        extra_files = _collect_files(write_beside, generation_config)
        if repository is not None:
            make_repository(repository, hf_upload_kwargs.get("token"))
        save_pretrained(
            model, str(path), config, extra_files=extra_files, dtype=dtype, max_file_bytes=max_shard_size, replace=True
        )
        if repository is not None:
            nbytes = sum(count_bytes_by_dtype(model).values())
            upload_checkpoint(str(path), [*extra_files], repository, nbytes, hf_upload_kwargs)


def _collect_files(write: Callable[[str], None], generation_config: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the small files to write beside the weights, name -> content; empty except in process 0.

    Args:
        write: function that writes the files into a folder.
    """
    files: dict[str, bytes] = {}

    def collect() -> None:
        if processes.process_index != 0:
            return
        with tempfile.TemporaryDirectory(prefix="shardplan-save-") as folder:
            try:
                write(folder)
            except Exception as error:  # of transformers, tokenizers and the hub
                raise ConfigError(f"the files beside the weights cannot be made: {one_line(error)}") from error
            for path in sorted(Path(folder).rglob("*")):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and name != CONFIG and not name.endswith(WEIGHT_SUFFIXES):
                    files[name] = path.read_bytes()
        if generation_config is not None:
            files["generation_config.json"] = json.dumps(generation_config, indent=2).encode()

    with open_process_group() as processes:
        processes.agree("files beside the weights", collect, lambda _: {})
    return files
