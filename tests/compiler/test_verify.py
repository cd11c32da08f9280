"""Verdicts of the real TPU compiler on memory, step times and refusals, through its worker processes."""

import dataclasses
import json
import re
import signal
import subprocess
import time

import pytest
from conftest import MODEL_TYPES, run
from processes import fork_python

from shardplan import config as configuration
from shardplan.config.command_flags import VerifyCommand
from shardplan.config.sections import CompiledProgram, CompilerConfig
from shardplan.errors import ConfigError
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.report.plan.verdicts import reason_text
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan
from shardplan.verify import run as runs
from shardplan.verify.case import Case
from shardplan.verify.compiler import run_worker
from shardplan.verify.compiler.libtpu import INSTALL_LIBTPU
from shardplan.verify.run import verify
from shardplan.verify.select_cases import build_cases
from shardplan.verify.verdict import MemoryLimit, Outcome, OutOfMemory, TimeLimit, Verdict

NO_CACHE = CompilerConfig(cache=None)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
}


def small_case(kind="eval", program=CompiledProgram.STEP, **settings) -> Case:
    """A Llama with two small layers on 8 devices of v4."""
    values = {
        "model.config": "llama-3.1-8b",
        "hardware.slice": "v4-16",
        "mesh.data": 4,
        "mesh.model": 2,
        "workload.kind": kind,
        "workload.batch": 8,
        "workload.position": 1024,
        **settings,
    }
    config = configuration.parse_config([f"--{key}={value}" for key, value in values.items()])
    hf_config = {**read_config("llama-3.1-8b", None, config.model_class), **SMALL}
    model = build_model(hf_config, config.workload.position)
    return Case(kind, make_plan(config, model), hf_config, program)


def bytes_by(verdict: Verdict, *kinds: str) -> int:
    return sum(c.bytes for c in verdict.collectives if c.kind in kinds)


@pytest.mark.usefixtures("forked_compiler")
def test_evaluation_of_405b_on_v4_256():
    """The compiler agrees with the plan: 6.6 GiB with its compiler options (6.5 without), of which parameters are 5.9.

    Positions are not sharded, so that all expected numbers can be calculated by hand.
    """
    arguments = ["--config", "configs/405b.yaml", "--forbid", "position", "--pin", "params.embed=data"]
    (case,) = build_cases(configuration.parse_config(arguments, VerifyCommand))
    (verdict,) = verify([case], NO_CACHE)
    assert verdict.fits and verdict.attention == "splash"
    assert case.plan.memory.peak == pytest.approx(verdict.memory.peak, rel=0.01)
    assert case.plan.cost.step_seconds == pytest.approx(verdict.time.step_seconds, rel=0.05)
    planned = sum(c.bytes for c in case.plan.cost.collectives)
    assert planned == pytest.approx(sum(c.bytes for c in verdict.collectives), rel=0.01)
    assert 6.6 < verdict.memory.peak / GIB < 6.7
    assert 5.9 < verdict.memory.arguments / GIB < 6.0
    # the all-reduces after attention and mlp: [1, 4096, 16384] bfloat16 in rings of 8, twice in each of 126 layers
    partial_sums = [c for c in verdict.collectives if c.kind == "all-reduce" and "batch, position, embed" in c.cause]
    assert sum(c.bytes for c in partial_sums) == 126 * 2 * (2 * 7 / 8 * 4096 * 16384 * 2)
    assert sum(c.count for c in partial_sums) == 2 * 126
    # 2 FLOPs for each parameter but the embedding's, and attention's q k^T and p v up to each position
    tokens, heads = 16 * 4096, 128 * 128
    flops = 2 * tokens * (405853388800 - 128256 * 16384 - 253 * 16384) + 126 * 4 * tokens * heads * (4096 + 1) / 2
    assert verdict.time.model_flops == pytest.approx(flops, rel=1e-6)
    assert verdict.time.mfu == pytest.approx(flops / 128 / 2.75e14 / verdict.time.step_seconds)


@pytest.mark.whole
def test_sharded_positions():
    """Splash attention gathers keys and values of all positions in every layer, as planned, and nothing else moves."""
    hf_config = {**read_config("llama-3.1-8b", None), **SMALL}
    arguments = ["--model.config=llama-3.1-8b", "--hardware.slice=v4-16", "--workload.batch=4"]
    pins = ["--workload.position=1024", "--pin", "position=replica", "mesh.replica=2"]
    model = build_model(hf_config, 1024)
    plan = make_plan(configuration.parse_config([*arguments, *pins]), model)
    assert plan.mesh == {"replica": 2, "data": 4, "model": 1} and plan.attention.strategy == "all_gather"
    (verdict,) = verify([Case("sharded", plan, hf_config, options=plan.compiler_options)], NO_CACHE)
    assert verdict.fits and verdict.attention == "splash"
    # bfloat16[4 key heads, 1024, 128] per sequence, keys and values, half of them from the other device; 2 layers
    expected = 2 * 2 * (4 * 1024 * 128 * 2) // 2
    assert sum(c.bytes for c in plan.cost.collectives) == expected
    assert bytes_by(verdict, "all-gather", "all-reduce", "reduce-scatter", "all-to-all") == expected


@pytest.mark.whole
def test_sharded_positions_in_training():
    """The compiler transfers as many bytes of keys, values and heads as the plan predicts, in both passes."""
    hf_config = {**read_config("llama-3.1-8b", None), **SMALL}
    model = build_model(hf_config, 1024)
    arguments = ["--model.config=llama-3.1-8b", "--hardware.slice=v4-16", "--workload.batch=4"]
    config = configuration.parse_config([*arguments, "--workload.position=1024", "--workload.kind=train"])
    gathered = {"replica": 4, "data": 2, "model": 1}, ["replica"], AttentionPlan("all_gather", ring=4)
    hybrid = {"replica": 2, "data": 2, "model": 2}, ["replica", "model"], AttentionPlan("hybrid", 2, 2)
    cases = []
    for mesh, along, method in (gathered, hybrid):
        mapping = {"batch": ["data"], "position": along}
        plan = plan_given_mappings(config, model, mesh, mapping, {"embed": ["data"]}, method)
        cases.append(Case(method.strategy, plan, hf_config, options=plan.compiler_options))

    def moved(collectives, axes, *kinds):
        return {kind: sum(c.bytes for c in collectives if (c.kind, c.mesh_axes) == (kind, axes)) for kind in kinds}

    first, second = verify(cases, NO_CACHE)
    for verdict, case, *of in (
        (first, cases[0], ["replica"], "all-gather", "reduce-scatter"),
        (second, cases[1], ["replica"], "collective-permute"),
        (second, cases[1], ["model"], "all-to-all"),
    ):
        assert verdict.fits and verdict.attention == "splash"
        assert min(moved(verdict.collectives, *of).values()) > 0
        assert moved(verdict.collectives, *of) == pytest.approx(moved(case.plan.cost.collectives, *of), rel=0.01)


@pytest.mark.whole
def test_train_step_updates_in_place():
    """Parameters and both moments are updated in the same memory; gradients are reduce-scattered."""
    batch, position = 8, 256
    settings = {"workload.batch": batch, "workload.position": position, "pin": "params.embed=data"}
    case = small_case("train", **{"workload.param_dtype": "float32", **settings})
    (verdict,) = verify([case], NO_CACHE)
    assert verdict.fits
    state = 3 * sum(p.bytes_per_device for p in case.plan.parameters)
    assert state <= verdict.memory.arguments <= 1.01 * state + 2**20  # tokens, and padding of small arrays
    assert verdict.memory.output < 2**20  # the loss; everything else replaces an argument
    # a gradient of every weight of a layer, float32 or bfloat16, scattered over the 4 devices of `data`
    weights = sum(p.bytes_per_device for p in case.plan.parameters if "layer" in p.axes and len(p.axes) > 2)
    assert bytes_by(verdict, "reduce-scatter", "all-reduce", "collective-permute") >= 3 * weights / 2
    parameters = sum(p.bytes_per_device for p in case.plan.parameters) / 4
    assert verdict.time.model_flops > 3 * 2 * batch * position * parameters


@pytest.mark.parametrize(
    ("kind", "program", "compiled"),
    [
        pytest.param("prefill", CompiledProgram.STEP, "prefill", marks=pytest.mark.whole),
        pytest.param("eval", CompiledProgram.LOAD, "load", marks=pytest.mark.whole),
    ],
)
def test_other_programs(kind, program, compiled):
    (verdict,) = verify([small_case(kind, program, **{"workload.position": 256})], NO_CACHE)
    assert verdict.fits and verdict.program == compiled


@pytest.mark.whole
def test_every_model_type_compiles(golden):
    cases = []
    for name in MODEL_TYPES:
        arguments = [f"--model.ref={golden / name}", "--hardware.slice=v4-16", "--workload.batch=8"]
        cases += build_cases(configuration.parse_config([*arguments, "--workload.position=64"], VerifyCommand))
    for name, verdict in zip(MODEL_TYPES, verify(cases, NO_CACHE), strict=True):
        assert verdict.fits, f"{name}: {reason_text(verdict.reason)}"


@pytest.mark.whole
def test_a_verdict_that_does_not_fit_names_the_buffers():
    """The program needs 68.4 GiB, as was measured before; the logits are the largest buffer."""
    arguments = ["--config", "configs/405b.yaml", "--against", "configs/levanter/405b-head-size.yaml"]
    config = configuration.parse_config(arguments, VerifyCommand)
    case = build_cases(config, config.options, config.against)[1]
    (verdict,) = verify([case], NO_CACHE)
    assert verdict.outcome == Outcome.DOES_NOT_FIT and not verdict.fits
    assert 68.3 < verdict.memory.peak / GIB < 68.5
    assert verdict.memory.buffers[0].shape == "bf16[16,4096,128256]"
    assert verdict.memory.buffers[1].op == "module.transformer.layers.stacked.mlp.gate_proj.weight"
    assert isinstance(verdict.reason, OutOfMemory)
    text = reason_text(verdict.reason)
    assert text.startswith("37.63 GiB too much; the largest: 15.66 GiB bf16[16,4096,128256] (contract embed")


@pytest.mark.usefixtures("forked_compiler")
@pytest.mark.parametrize(
    ("model_class", "module", "uneven_batch"),
    [
        (None, "segments[0].stacked.layers[0]", ["batch (6) is not divisible by the 4 devices that shard it"]),
        (LEVANTER, "transformer.layers.stacked", ["(of size 6)", "(of total size 4)"]),
    ],
)
def test_refused_mappings(model_class, module, uneven_batch):
    """A mapping for which JAX would raise an exception is refused, and the reason names its axes."""
    case = small_case(**{"model.levanter_class": model_class} if model_class else {})
    twice = {**case.plan.param_mapping, "kv_head": ["model"], "embed": ["model"], "mlp": ["model"]}
    spec = {axis: list(mesh_axes) for axis, mesh_axes in twice.items()}
    parameters = [dataclasses.replace(p, spec=[spec.get(axis) for axis in p.axes]) for p in case.plan.parameters]
    duplicate = dataclasses.replace(case.plan, param_mapping=twice, parameters=parameters)
    uneven = dataclasses.replace(case.plan, compute_mapping={**case.plan.compute_mapping, "batch": ["data", "replica"]})
    uneven = dataclasses.replace(uneven, workload=dataclasses.replace(uneven.workload, batch=6))
    first, second = verify([dataclasses.replace(case, plan=plan) for plan in (duplicate, uneven)], NO_CACHE)
    assert first.outcome == second.outcome == Outcome.REFUSED
    reasons = [reason_text(verdict.reason) for verdict in (first, second)]
    assert f"kv_head, embed of {module}.self_attn.q_proj.weight are all mapped to 'model'" in reasons[0]
    assert all(part in reasons[1] for part in uneven_batch)


@pytest.fixture
def mib_for_gib(monkeypatch):
    """Makes `compiler.gib` count MiB, so that every compile reaches its minimum of 1."""
    monkeypatch.setattr(run_worker, "GIB", 2**20)


def test_the_time_limit_is_a_verdict():
    (slow,) = verify([small_case()], dataclasses.replace(NO_CACHE, seconds=1))
    assert (slow.outcome, slow.reason) == (Outcome.UNDECIDED, TimeLimit(1))
    assert reason_text(slow.reason) == "not compiled in 1 s; raise compiler.seconds"


def test_the_memory_limit_is_a_verdict(mib_for_gib):
    (large,) = verify([small_case()], dataclasses.replace(NO_CACHE, gib=1))
    assert (large.outcome, large.program) == (Outcome.UNDECIDED, "eval")
    assert large.reason == MemoryLimit(1)
    assert reason_text(large.reason) == "compiling took more than 1 GiB of this machine; raise compiler.gib"


@pytest.mark.whole
def test_the_cache_returns_results_of_the_same_program_only(tmp_path, monkeypatch):
    compiler = CompilerConfig(cache=str(tmp_path / "cache"), jobs=4)
    case = small_case()
    first, second, third = verify([case] * 3, compiler)
    (path,) = (tmp_path / "cache").glob("*.gz")
    assert first == second == third and first.fits  # compiled once, though all three run at the same time

    def compile_case(*_):
        raise AssertionError("compiled")

    def compute_facts(_):
        raise AssertionError("the model is built again")

    monkeypatch.setattr(runs, "compile_case", compile_case)
    compute = runs.compute_facts
    monkeypatch.setattr(runs, "compute_facts", compute_facts)
    # neither limits of this machine nor the planner's estimates change the compiled program
    faster = dataclasses.replace(case.plan, cost=dataclasses.replace(case.plan.cost, step_seconds=0.0))
    assert verify([dataclasses.replace(case, plan=faster)], dataclasses.replace(compiler, seconds=1)) == [first]
    monkeypatch.setattr(runs, "compute_facts", compute)
    for changed in (
        dataclasses.replace(case, options={"xla_tpu_enable_async_collective_fusion": "true"}),
        dataclasses.replace(case, plan=dataclasses.replace(case.plan, mesh={"replica": 2, "data": 2, "model": 2})),
        dataclasses.replace(case, program=CompiledProgram.LOAD),
        dataclasses.replace(case, hf_config={**case.hf_config, "rms_norm_eps": 0.5}),
    ):
        with pytest.raises(AssertionError, match="compiled"):
            verify([changed], compiler)
    with pytest.raises(ConfigError, match=r"the plan is for .* with layer 2, the model has 3"):
        verify([dataclasses.replace(case, hf_config={**case.hf_config, "num_hidden_layers": 3})], compiler)
    for damaged in (path.read_bytes()[:1000], b"", b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(AssertionError, match="compiled"):
            verify([case], compiler)


def test_a_cache_that_cannot_be_written_is_an_error_before_compiling(tmp_path, raises_message):
    (tmp_path / "file").write_text("")
    with raises_message(ConfigError):
        verify([small_case()], CompilerConfig(cache=str(tmp_path / "file" / "cache")))


def test_limits_are_not_cached(tmp_path, mib_for_gib):
    (verdict,) = verify([small_case()], CompilerConfig(cache=str(tmp_path), gib=1))
    assert verdict.outcome == Outcome.UNDECIDED
    assert not list(tmp_path.glob("*.gz"))


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(runs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"libtpu; install it with: {re.escape(INSTALL_LIBTPU)}$"):
        verify([small_case()], NO_CACHE)


def test_plans_of_another_model_and_of_other_settings_are_refused(tmp_path):
    """Otherwise one model would be compiled under the name of another."""
    plan = tmp_path / "plan.json"
    small_case().plan.save(str(plan))
    for extra, message in (
        (
            ["--model.config=llama-3.1-70b"],
            "the plan is for llama-3.1-8b with ",
        ),
        (["--workload.batch=16"], "workload.batch is 16, plan "),
        (["--mesh.model=8"], "mesh.model is 8, plan "),
    ):
        done = run("verify", f"--plan={plan}", *extra)
        assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.whole
def test_against_ranks_what_fits_first(tmp_path):
    """The JSON ranks the configuration's own plan, a plan file, and a Levanter configuration that is refused."""
    case = small_case()
    case.plan.save(str(tmp_path / "given.json"))
    axes = {"mlp": "model", "embed": "model"}
    layout = {"trainer": {"mp": "bf16", "mesh": {"axes": {"model": 8}, "shared_mapping": axes, "param_mapping": {}}}}
    (tmp_path / "levanter.yaml").write_text(json.dumps(layout))
    (tmp_path / "model.json").write_text(json.dumps(case.hf_config))
    done = run(
        "verify",
        f"--model.config={tmp_path / 'model.json'}",
        "--hardware.slice=v4-16",
        "--workload.batch=8",
        "--workload.position=1024",
        "--compiler.cache=null",
        "--against",
        str(tmp_path / "levanter.yaml"),
        str(tmp_path / "given.json"),
        "--json=-",
    )
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)["verdicts"]
    assert [v["outcome"] for v in verdicts] == ["fits", "fits", "refused"]
    assert verdicts[2]["label"].endswith("levanter.yaml")
    steps = [v["time"]["step_seconds"] for v in verdicts[:2]]
    assert steps == sorted(steps)


@pytest.mark.usefixtures("forked_compiler")
def test_exit_code_and_error_line_if_nothing_fits():
    done = run(
        "verify",
        "--config=configs/405b.yaml",
        "--hardware.slice=v4-16",
        "--workload.batch=8",
        "--compiler.cache=null",
    )
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("shardplan verify: ")]
    assert "v4-16: eval does not fit: " in line and "GiB too much; the largest: " in line
    assert "does not fit" in done.stdout and "Largest buffers" in done.stdout


def test_interrupted_compiles_leave_no_process(tmp_path):
    arguments = ["--config=configs/405b.yaml", "--compiler.cache=null"]
    process = fork_python(["-m", "shardplan.verify", *arguments], TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("shardplan-verify-*/log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)  # the code would be 0 if it had reached its verdict
    assert process.returncode == 130 and "Traceback" not in errors
    assert not list(tmp_path.glob("shardplan-verify-*"))
    assert str(tmp_path) not in subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
