"""The output head of a checkpoint whose config.json ties the head to the embedding.

Tied models have one array for both. Some checkpoints hold a head nevertheless: a copy of the embedding, or one that was
trained apart, which transformers 5 then uses. Which of the two it is, only the values say. They are compared before the
model is planned, so that a head of its own is planned for, loaded and used.
"""

import logging
from typing import Any

from shardplan.checkpoint.adapter.adapter import read_adapter
from shardplan.checkpoint.format.codecs.decode_index import quantization_of
from shardplan.checkpoint.format.compare import hold_the_same
from shardplan.checkpoint.format.shared_index import read_shared_index
from shardplan.checkpoint.match import is_tied, match_checkpoint
from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.runtime.processes.group import ProcessGroup
from shardplan.storage import Folder

logger = logging.getLogger(__name__)

UNTIED = {"tie_word_embeddings": False}
"""Keys of config.json for a model with a separate output head."""
HEAD_PATH = "lm_head.weight"
"""Path of the output head in Levanter models that have a separate one."""


def has_own_head(template: Any, folder: Folder, processes: ProcessGroup, adapter: Folder | None = None) -> bool:
    """Return whether the checkpoint of a tied model holds an output head that differs from the embedding.

    Every process calls this; process 0 compares the values.

    Args:
        adapter: the folder of an adapter, which may have saved a head.

    Raises:
        CheckpointError: the checkpoint or the adapter does not match the model, or is damaged.
    """
    index = read_shared_index(folder, processes)

    def compare() -> str:
        read = None if adapter is None else read_adapter(adapter)
        match = match_checkpoint(template, index, folder.ref, quantization_of(folder), read)
        if match.head is None:
            return ""
        head, embedding = match.head
        return "" if hold_the_same([(match.tensors[head], match.tensors[embedding])]) else head

    head = processes.broadcast("output head", compare)
    if head and processes.process_index == 0:
        logger.warning(
            "%s: config.json ties the output head to the embedding, and %s differs from it; it is the head, as for "
            "transformers", folder.ref, head,
        )  # fmt: skip
    return bool(head)


def check_head(plan: Plan, template: Any) -> None:
    """Check that a plan has an output head exactly if the model has a separate one.

    >>> from types import SimpleNamespace
    >>> plan = SimpleNamespace(parameters=[SimpleNamespace(path="lm_head.weight")])
    >>> check_head(plan, SimpleNamespace(lm_head=None))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: the plan has lm_head.weight, and the model has its embedding as output head; ...

    Raises:
        ConfigError: only one of the two has an output head.
    """
    is_planned = any(parameter.path == HEAD_PATH for parameter in plan.parameters)
    if is_tied(template) and is_planned:
        raise ConfigError(f"the plan has {HEAD_PATH}, and the model has its embedding as output head; plan again")
    if getattr(template, "lm_head", None) is not None and not is_planned:
        raise ConfigError(
            f"the plan has no {HEAD_PATH}, and the checkpoint holds an output head that differs from its embedding; "
            'set "tie_word_embeddings": false in its config.json, and plan again'
        )
