"""Applies Gemma 2's final soft cap, which Levanter's configuration has but its model ignores.

The methods of Levanter's class are replaced. A subclass would be another type of module, which does not fit the state
of an optimizer that was made for Levanter's class.
"""

import logging
from typing import Any

import haliax as hax
from haliax import NamedArray

logger = logging.getLogger(__name__)


def cap_gemma2_logits() -> None:
    """Make Levanter's Gemma 2 apply its configuration's `final_logit_softcapping` to logits and losses.

    Code that builds or loads a Gemma 2 calls it. It does nothing the second time, or if Levanter's Gemma 2 has a
    `__call__` of its own.
    """
    from levanter.models.gemma import Gemma2LMHeadModel

    if "__call__" in vars(Gemma2LMHeadModel):
        return
    base: Any = Gemma2LMHeadModel.__mro__[1]  # LmHeadModel

    def call(self: Any, *arguments: Any, **settings: Any) -> NamedArray:
        """Compute the logits of the next tokens, with the soft cap of the configuration."""
        logits = base.__call__(self, *arguments, **settings)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * hax.tanh(logits / cap)

    def compute_next_token_loss(self: Any, example: Any, **settings: Any) -> Any:
        """Compute Levanter's loss with the configuration's soft cap, unless the caller gives another one."""
        if settings.get("logit_soft_cap") is None:
            settings["logit_soft_cap"] = self.config.final_logit_softcapping
        return base.compute_next_token_loss(self, example, **settings)

    Gemma2LMHeadModel.__call__ = call
    if hasattr(base, "compute_next_token_loss"):
        Gemma2LMHeadModel.compute_next_token_loss = compute_next_token_loss
    else:
        logger.warning(
            "compute_next_token_loss of this Levanter leaves out the final soft cap of Gemma 2; pass "
            "logit_soft_cap=model.config.final_logit_softcapping"
        )
