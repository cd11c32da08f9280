"""Streamed with a planned sharding, every model gives the logits that transformers gives."""

import numpy as np
import pytest
from conftest import MODEL_TYPES

from shardplan.checkpoint import stream_model
from shardplan.eval.evaluate import forward_logits
from shardplan.model import build_model, read_config
from shardplan.plan.planner import make_plan
from shardplan.runtime.devices import make_mesh
from shardplan.runtime.storage import open_folder

TOLERANCE = 2e-5
MESHES = [(1, 4, 2), (2, 2, 2), (1, 1, 8), (1, 8, 1)]


@pytest.mark.parametrize("name", MODEL_TYPES)
@pytest.mark.parametrize(("replica", "data", "model_axis"), MESHES)
def test_logits_equal_transformers(golden, make_config, name, replica, data, model_axis):
    reference = np.load(golden / name / "golden.npz")
    tokens = np.tile(reference["tokens"], (4, 1))  # 8 sequences, so that every mesh divides the batch
    config = make_config(
        model_ref=golden / name,
        workload_batch=len(tokens),
        workload_position=tokens.shape[1],
        workload_param_dtype="float32",
        workload_compute_dtype="float32",
        mesh_replica=replica,
        mesh_data=data,
        mesh_model=model_axis,
    )
    folder = open_folder(config.model.ref)
    model = build_model(read_config(None, folder), config.workload.position)
    plan = make_plan(config, model)
    mesh = make_mesh(plan.mesh)
    module = stream_model(model.template, folder, mesh, plan.param_mapping, plan.workload.param_dtype)
    logits = forward_logits(module, model, plan, mesh, tokens)
    expected = np.tile(reference["logits"], (4, 1, 1))
    assert np.abs(expected).max() > 1  # the comparison below is worth something
    assert np.abs(logits - expected).max() <= TOLERANCE
