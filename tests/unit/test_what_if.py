"""What other settings of a configuration would change."""

from shardplan.explain.what_if import what_if


def test_what_if_something_fits(llama_model, llama_config):
    variants = {variant.change: variant.plan for variant in what_if(llama_config(), llama_model)}
    assert list(variants) == [
        "as it is", "workload.batch 4", "workload.batch 16", "hardware.slice v4-32", "hardware.slice v4-128",
        "workload.param_dtype float32",
    ]  # fmt: skip
    assert all(variants.values())
    assert variants["hardware.slice v4-128"].cost.step_seconds < variants["as it is"].cost.step_seconds


def test_what_if_nothing_fits(llama_model, llama_config):
    """Each change is enlarged until a plan fits, and no further."""
    variants = what_if(llama_config(hardware_slice="v5e-4", workload_kind="train", workload_batch=2), llama_model)
    fits = {variant.change: variant.plan is not None for variant in variants}
    assert not fits["as it is"] and "missing" in variants[0].obstacle
    for key in ("hardware.slice", "workload.batch"):
        of_key = [fits[change] for change in fits if change.startswith(key)]
        assert of_key and not any(of_key[:-1])
    assert fits["hardware.slice v5e-8"]
