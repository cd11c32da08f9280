"""The lm_eval tasks that the model `shardplan` can run: tasks that score texts.

lm_eval passes a model its requests one kind after the other, so that a task which generates text would end a run after
the weights were loaded and others were scored. Models cannot choose among tasks: `lm_eval.evaluator.evaluate`, which
has both the model and the tasks, is wrapped instead. Other models are evaluated as before.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from shardplan.errors import ConfigError, names_text

SCORED = frozenset({"loglikelihood", "loglikelihood_rolling"})
"""Kinds of requests that can be scored."""
REQUEST_KINDS = {"multiple_choice": "loglikelihood"}
"""Output type of a task -> kind of its requests, if the names differ."""
IMAGES = "images or audio"
GENERATION_REFUSED = (
    "shardplan scores texts and does not generate any; leave out tasks whose output_type is generate_until, or run "
    "them with another model"
)
left_out: dict[str, str] = {}
"""Task omitted in this process so far -> the feature that it would need; the command ends with this list."""
logger = logging.getLogger(__name__)


def select_tasks(evaluate: Callable[..., Any], is_own: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wrap `lm_eval.evaluator.evaluate` to leave out unsupported tasks before anything is loaded.

    Args:
        evaluate: the function of lm_eval.
        is_own: returns the `ShardplanLM` in the argument `lm`, or None if `lm` is another model.
    """

    @wraps(evaluate)
    def select_and_evaluate(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        model = is_own(lm)
        if model is not None:
            loaded = task_dict if "tasks" in task_dict else flatten_tasks(task_dict)
            task_dict, model.left_out = _split_tasks(loaded)
            left_out.update(model.left_out)
        return evaluate(lm, task_dict, *args, **kwargs)

    return select_and_evaluate


def _split_tasks(loaded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tasks that can run, and for each other task the feature that it would need.

    A group with a task that cannot run is left out too, because a mean over fewer tasks must not have the group's name.
    The other tasks of the group are run.

    Args:
        loaded: `tasks`, `groups` and `group_map` by name, as `TaskManager.load` returns them.

    Raises:
        ConfigError: none of the tasks can be run.
    """
    refused: dict[str, str] = {}
    for name, task in loaded["tasks"].items():
        needs = sorted(_request_kinds(task) - SCORED)
        if getattr(task, "MULTIMODAL", False):
            needs.append(IMAGES)
        if needs:
            refused[name] = ", ".join(needs)
    if not refused:
        return loaded, refused
    if len(refused) == len(loaded["tasks"]):
        raise ConfigError(f"{GENERATION_REFUSED} ({left_out_text(refused)})")
    tasks = {name: task for name, task in loaded["tasks"].items() if name not in refused}
    groups, incomplete = {}, []
    for name, group in (loaded.get("groups") or {}).items():
        if any(task.task_name in refused for task in group.get_all_tasks()):
            incomplete.append(name)
        else:
            groups[name] = group
    logger.warning("left out, because shardplan only scores texts: %s", left_out_text(refused))
    if incomplete:
        logger.warning("no result of the group %s, of which tasks are left out", ", ".join(incomplete))
    children = {name: group.child_names for name, group in groups.items()}
    return {**loaded, "tasks": tasks, "groups": groups, "group_map": children}, refused


def flatten_tasks(nested: dict[Any, Any]) -> dict[str, Any]:
    """Return the tasks and groups of lm_eval's nested `get_task_dict` by name, as `TaskManager.load` does."""
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for key, value in nested.items():
        if not isinstance(key, str):
            groups[key.name] = key
        if isinstance(value, dict):
            inner = flatten_tasks(value)
            tasks.update(inner["tasks"])
            groups.update(inner["groups"])
        else:
            tasks[key] = value
    return {"tasks": tasks, "groups": groups}


def _request_kinds(task: Any) -> set[str]:
    """Return the kinds of requests that a task makes.

    For a task of an lm_eval class, the output type decides. A task with its own class may make requests of other kinds,
    or of several; the requests for its first document decide.
    """
    kind = REQUEST_KINDS.get(task.OUTPUT_TYPE, task.OUTPUT_TYPE)
    if _makes_requests_itself(task):
        try:
            _, document = next(iter(task.doc_iterator(limit=1)))
            made = task.construct_requests(document, "", metadata=(task.task_name, 0, 1))
        except Exception as error:  # code of a task
            logger.debug("requests of %s cannot be made ahead: %s", task.task_name, error)
        else:
            return {each.request_type for each in (made if isinstance(made, list) else [made])}
    return {kind}


def _makes_requests_itself(task: Any) -> bool:
    """Return whether a class outside of `lm_eval.api` defines how a task makes its requests."""
    for cls in type(task).__mro__:
        if "construct_requests" in vars(cls):
            return not cls.__module__.startswith("lm_eval.api.")
    return False


def left_out_text(tasks: dict[str, str]) -> str:
    """Format omitted tasks and what each would need: `gsm8k and humaneval (generate_until), chartqa (images or audio)`.

    >>> left_out_text({"gsm8k": "generate_until", "humaneval": "generate_until", "chartqa": "images or audio"})
    'gsm8k and humaneval (generate_until), chartqa (images or audio)'
    """
    by_need: dict[str, list[str]] = {}
    for name, need in tasks.items():
        by_need.setdefault(need, []).append(name)
    return ", ".join(f"{names_text(names)} ({need})" for need, names in by_need.items())
