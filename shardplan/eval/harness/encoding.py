"""Encodes the texts of lm_eval's requests as its `hf` model does, with remarks on some requests.

`hf` encodes a context with its continuation, and takes the tokens after as many as the context has by itself for those
of the continuation. Where a tokenizer merges across the join there may be none, and `hf` ends: here the continuation is
encoded by itself then.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardplan.eval.harness.requests import Request

MAX_TASKS = 8
"""Maximum number of tasks that a remark names."""


class Remark(StrEnum):
    """A remark for the user about how some requests were encoded."""

    TRUNCATED = "truncated"
    """The beginning of the context did not fit, and was cut off."""
    ENCODED_ALONE = "continuation_encoded_alone"
    """No token begins after the context, so that the continuation was encoded by itself."""
    NO_CONTEXT = "context_without_tokens"
    """The context is not empty and has no tokens, so that the prefix token took its place."""


class Remarks:
    """Counts how many requests each remark concerns, by remark and task."""

    def __init__(self) -> None:
        self._counts: dict[Remark, Counter[str]] = {remark: Counter() for remark in Remark}

    def add(self, remark: Remark, task: str) -> None:
        """Count a request of a task."""
        self._counts[remark][task] += 1

    def update(self, other: "Remarks") -> None:
        """Add the counts of another `Remarks`."""
        for remark, counts in other._counts.items():
            self._counts[remark].update(counts)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return remark -> task -> number of requests, without zeros."""
        return {f"requests_{remark}": dict(counts) for remark, counts in self._counts.items() if counts}

    def lines(self, total: int, max_length: int) -> list[str]:
        """Return a sentence for each remark that concerns some of `total` requests."""
        texts = {
            Remark.TRUNCATED: f"had contexts that lost their beginnings, because max_length is {max_length}",
            Remark.ENCODED_ALONE: (
                "had no token that begins after the context: their continuations were encoded by themselves"
            ),
            Remark.NO_CONTEXT: "had contexts without tokens (spaces alone): the prefix token took their place",
        }
        lines = []
        for remark, counts in self._counts.items():
            if counts:
                tasks = [f"{task} {count}" for task, count in counts.most_common(MAX_TASKS)]
                more = [f"{len(counts) - MAX_TASKS} more tasks"] if len(counts) > MAX_TASKS else []
                lines.append(f"{counts.total()} of {total} requests {texts[remark]} ({', '.join([*tasks, *more])})")
        return lines


@dataclass(frozen=True)
class RequestEncoder:
    """Encodes the texts of lm_eval's requests as its `hf` model does, and counts remarks."""

    encode: Callable[..., list[int]]
    """`ShardplanLM.tok_encode`, which encodes a text."""
    encode_pair: Callable[[str, str], tuple[list[int], list[int]]]
    """`TemplateLM._encode_pair`, which encodes a nonempty context and its continuation."""
    prefix_token: Callable[[], int]
    """Return the token before a text without context; raise an error if there is none."""
    max_length: int

    def encode_all(self, requests: Iterable[Any]) -> tuple[list[Request], Remarks]:
        """Encode lm_eval's `loglikelihood` requests."""
        encoded, remarks = [], Remarks()
        for each in requests:
            task = each.task_name or "unnamed task"
            context, continuation = each.args[:2]
            request, found = self._encode(context, continuation, task)
            if len(request.context) + len(request.continuation) > self.max_length + 1:
                found.append(Remark.TRUNCATED)
            for remark in found:
                remarks.add(remark, task)
            encoded.append(request)
        return encoded, remarks

    def _encode(self, context: str, continuation: str, task: str) -> tuple[Request, list[Remark]]:
        if context == "":
            ids = self.encode(continuation, add_special_tokens=False)
            prefix = self.prefix_token()
            if ids[:1] == [prefix]:  # the text begins with it already
                return Request(ids[:1], ids[1:], task), []
            return Request([prefix], ids, task), []
        before, after = self.encode_pair(context, continuation)
        remarks = []
        if not after:
            kept = context.rstrip()  # `encode_pair` counts spaces at the end with the continuation
            after = self.encode(context[len(kept) :] + continuation, add_special_tokens=False)
            remarks.append(Remark.ENCODED_ALONE)
        if not before:
            before = [self.prefix_token()]
            remarks.append(Remark.NO_CONTEXT)
        return Request(before, after, task), remarks
