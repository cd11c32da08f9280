"""Programs for the devices of a mesh: the steps and the model, with a plan's shardings, compiled ahead of time."""

from shardplan.execution.aot_program import Program, abstract_model
from shardplan.execution.specialize import specialize
from shardplan.execution.step_program import step_program

__all__ = ["Program", "abstract_model", "specialize", "step_program"]
