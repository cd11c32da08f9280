"""Traces a few steps for xprof: `--profile DIR`."""

import logging

import jax

from shardplan.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

FIRST_STEP, STEPS = 3, 3
"""Number of steps before the trace begins, and number of traced steps."""


class StepProfile:
    """Traces a few steps of a run in this process."""

    def __init__(self, folder: str | None):
        """Prepare to write the trace to `folder`; None for no trace."""
        self._folder = folder
        self._is_running = False

    def on_step(self, steps: int) -> None:
        """Start or end the trace, depending on the number of finished steps.

        Raises:
            ConfigError: the trace cannot be written.
        """
        if self._folder is None:
            return
        if steps == FIRST_STEP:
            try:
                jax.profiler.start_trace(self._folder)
            except Exception as error:  # of the folder, or of another profile that runs
                raise ConfigError(f"profile {self._folder} cannot be written: {one_line(error)}") from error
            self._is_running = True
        elif steps == FIRST_STEP + STEPS:
            self.stop()

    def stop(self) -> None:
        """End the trace if it is running; warn if the run ended before the trace began."""
        if self._is_running:
            jax.profiler.stop_trace()
        elif self._folder is not None:
            logger.warning("profile: the run has no more than %d steps, so that there is no trace", FIRST_STEP)
        self._folder, self._is_running = None, False
