"""The step of scores: probability, rank and top-k probabilities of every token."""

from typing import Any

import haliax as hax
from haliax import NamedArray

from shardplan.model.logits.token_scores import ScoreSettings, TokenScores, score_next_tokens
from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.steps.forward import equal_windows
from shardplan.steps.inputs import abstract_tokens
from shardplan.steps.kind import StepRun


class ScoreStep:
    """Computes (module, tokens) -> `TokenScores`, arrays with the axes and the sharding of the int32 tokens.

    The last score of a window or sequence has no meaning, because the next token belongs to another window or sequence.
    Windows of several lengths need a further input, `window_starts`, as for `LossStep`; windows of equal length need
    none.
    """

    name = "score"
    donates = False

    def state(self, workload: Workload, parameters: Any) -> tuple[Any, ...]:
        """Return nothing: scores need no state."""
        return ()

    def inputs(self, model: Model, workload: Workload, is_packed: bool = False) -> tuple[NamedArray, ...]:
        """Return `tokens`, and `window_starts` for windows of several lengths."""
        tokens = abstract_tokens(model, workload)
        return (tokens, tokens) if is_packed else (tokens,)

    def compute(
        self, run: StepRun, module: Any, tokens: NamedArray, window_starts: NamedArray | None = None
    ) -> TokenScores:
        """Compute the scores, with their logits in the blocks of the workload."""
        workload = run.workload
        settings = ScoreSettings(workload.top_k, workload.num_logit_blocks, run.vocab_shards, workload.temperature)
        module = run.for_compute(module)
        if window_starts is None:
            window_starts = equal_windows(tokens.axes[-1], workload.window)
        stream = run.forward.activations(run.model, module, tokens, window_starts)
        scores = score_next_tokens(module, stream, tokens, run.model.logit_soft_cap, settings)
        return TokenScores(*map(hax.auto_sharded, scores))
