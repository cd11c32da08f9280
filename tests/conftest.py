"""Eight virtual CPU devices for every test, and the golden checkpoints."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# nearly all programs of tests run once, and compile for longer than they run; the emitters of fusions by MLIR take two
# thirds of that, and dividing each program for 32 threads a tenth of the rest
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true --xla_cpu_parallel_codegen_split_count=1",
)

import tempfile

if "SHARDPLAN_TESTS_FOLDER" not in os.environ:
    # this run's server of processes (tests/processes.py), which all workers of pytest share
    RUN = tempfile.TemporaryDirectory(prefix="shardplan-tests-", suffix=f"-{os.getpid()}")
    os.environ["SHARDPLAN_TESTS_FOLDER"] = RUN.name
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # what one process has compiled, the others of this run load: pytest's workers, and the processes that tests start
    COMPILED = tempfile.TemporaryDirectory(prefix="shardplan-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

from unittest import mock

with mock.patch("sys.addaudithook"):
    # its hook, against forks while it locks a file, is called at every id(): a hundredth of the time of all tests
    import filelock  # noqa: F401

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import settings
from processes import ForkedProcess, fork_python
from tokenizers import Tokenizer, models, pre_tokenizers

from shardplan.__main__ import main
from shardplan.eval import workers

pytest_plugins = ["messages"]

settings.register_profile("shared_machine", deadline=None)  # tests beside others take longer at times
settings.load_profile("shared_machine")
jax.config.update("jax_num_cpu_devices", 8)
gc.disable()  # until all tests are imported: nearly all that an import makes stays

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "data"
LLAMA_CONFIG = "llama-3.1-8b"
MODEL_TYPES = sorted(path.name for path in GOLDEN.iterdir())


@pytest.fixture
def patched_levanter(monkeypatch):
    """Levanter as `shardplan.patch_levanter` makes it, until the end of the test."""
    from levanter import tracker
    from levanter.compat.hf_checkpoints import HFCheckpointConverter
    from levanter.models import loss, mixtral, qwen3_moe

    from shardplan import levanter_patch
    from shardplan.model.logits.levanter_loss import FUSED_LOSS

    for name in ("load_pretrained", "save_pretrained"):
        monkeypatch.setattr(HFCheckpointConverter, name, getattr(HFCheckpointConverter, name))
    monkeypatch.setattr(loss, FUSED_LOSS, getattr(loss, FUSED_LOSS, None), raising=False)
    monkeypatch.setattr(tracker, "jit_log", tracker.jit_log)
    for block in (mixtral.MixtralSparseMoeBlock, qwen3_moe.Qwen3MoeSparseMoeBlock):
        monkeypatch.setattr(block, "__call__", block.__call__)
    levanter_patch.patch_levanter()


def program_of(kind, model, plan, mesh, is_packed=False):
    """The program of a kind of step, with the mesh and mappings of a plan that may be for another kind."""
    from shardplan.execution import step_program

    workload = dataclasses.replace(plan.workload, kind=kind)
    return step_program(model, dataclasses.replace(plan, workload=workload), mesh, is_packed)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="also what takes hours: the whole matrices of attention")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `whole`, unless it is asked for, and orders the others for several workers.

    The inner loop, `-m "not slow"`, is the tests of unit/ and documentation/ that are not marked `slow`, and those of
    other folders that are marked `quick`.
    """
    for item in items:
        if item.path.parent.name not in ("unit", "documentation") and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items[:] = list(spread_runs(items))


def spread_runs(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield all tests, those that start runs of several processes evenly among the others.

    They wait more than they compute: one after the other they leave processors idle, and beside each other they are
    slower than their deadlines allow. They stand between modules, whose fixtures are made once.
    """
    runs = [item for item in items if "multiprocess" in item.path.parts]
    others = [item for item in items if "multiprocess" not in item.path.parts]
    done = started = 0
    for _, tests in itertools.groupby(others, key=lambda item: item.path):
        module = list(tests)
        yield from module
        done += len(module)
        due = len(runs) * done // len(others)
        yield from runs[started:due]
        started = due
    yield from runs[started:]


def pytest_collection_finish() -> None:
    """Makes the search for unreachable objects rarer, and spares it what was imported: a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """The width of piped tables does not depend on the environment that runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def store(monkeypatch):
    """Start an S3 server on loopback; yields its client, its environment, and the sizes of tensor data it has sent."""
    import botocore.session
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    sent = []
    moto = DomainDispatcherApplication(create_backend_app)

    def record_sizes(environ, start_response):
        def record_start(status, headers, *rest):
            first = int(environ.get("HTTP_RANGE", "bytes=0-").removeprefix("bytes=").split("-")[0])
            if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".safetensors"):
                sent.append((first, int(dict(headers)["Content-Length"])))
            return start_response(status, headers, *rest)

        return moto(environ, record_start)

    server = make_server("127.0.0.1", 0, record_sizes, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = botocore.session.Session().create_client("s3")
    client.create_bucket(Bucket="models")
    yield client, environment, sent
    server.shutdown()
    get_backend("s3").reset()  # moto keeps objects for the life of the process, which other tests share


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of real Hugging Face checkpoints with float32 logits by transformers (golden.npz)."""
    return GOLDEN


@pytest.fixture(scope="session")
def tpu_compiler() -> None:
    """Lets this process use libtpu, as the processes that verify starts do."""
    from shardplan.hardware import parse_slice
    from shardplan.verify.compiler.libtpu import libtpu_environment

    os.environ.update(libtpu_environment(parse_slice("v4-8")))


@pytest.fixture(scope="session", autouse=True)
def forked_readers():
    """Workers that read texts for runs in this process are forked from one that has made their imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([workers.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "get_context", lambda _: context)
        yield


@pytest.fixture(scope="session", autouse=True)
def build_shared():
    """Plans for one config.json and number of positions share its model, and so the traces of its steps."""
    from shardplan.model.model_class import CLASS_KEY
    from shardplan.model.registry import build_model

    models = {}

    def build(hf_config, position, shorten=False):
        key = json.dumps(hf_config), position
        if key in models:
            return models[key]
        model = build_model(hf_config, position, shorten)
        # a class of a test may be another one under the same name, and without `shorten` a model may be refused
        if CLASS_KEY not in hf_config and position <= model.positions:
            models[key] = model
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardplan.search.make_plan.build_model", build)
        yield build


@pytest.fixture
def own_hub(monkeypatch, tmp_path):
    """This process has no peers after the test, and the stacks of processes that are stuck are in its folder."""
    from shardplan.runtime.processes import link
    from shardplan.runtime.processes.watch import watch
    from shardplan.runtime.processes.watch.stacks import Stacks

    monkeypatch.setattr(link, "_current", None)
    monkeypatch.setattr(watch, "process_stacks", lambda: Stacks(tmp_path / "stacks.txt"))


@pytest.fixture
def without_pictures(monkeypatch):
    """Runs in this process draw nothing."""
    monkeypatch.setattr("shardplan.commands.eval.eval.draw_extraction", lambda *_: None)


@pytest.fixture
def forked_compiler(monkeypatch):
    """Compile workers of this process are forked from the server of processes, which has made their imports."""
    from shardplan.verify.compiler import run_worker

    def fork(command, env, stdout, stderr):
        return ForkedProcess(command[1:], str(ROOT), env, outputs=[stdout.fileno(), stdout.fileno()])

    monkeypatch.setattr(run_worker, "subprocess", SimpleNamespace(Popen=fork, STDOUT=subprocess.STDOUT))


@pytest.fixture
def make_config():
    """A `Config` from overrides with `_` for the first dot: make_config(workload_batch=4, model_ref="x")."""
    from shardplan import config

    def make(**overrides):
        given = {key: value for key, value in overrides.items() if value is not None}
        argv = [f"--{key.replace('_', '.', 1)}={value}" for key, value in given.items()]
        return config.parse_config(argv)

    return make


@pytest.fixture(scope="session")
def mixed_attention(build_shared, tmp_path_factory):
    """A configuration and its plan: Gemma 3 with a window in five of six layers, and positions over eight devices."""
    from shardplan.config import parse_config
    from shardplan.search.make_plan import make_plan

    values = json.loads((GOLDEN.parent / "families" / "gemma3_text" / "config.json").read_text())
    path = tmp_path_factory.mktemp("mixed") / "config.json"
    path.write_text(json.dumps({**values, "num_hidden_layers": 20}))
    settings = ["--hardware.slice=v4-16", "--mesh.data=8", "--workload.batch=1", "--workload.position=64"]
    config = parse_config([f"--model.config={path}", "--pin=position=data", *settings])
    return config, make_plan(config)


@pytest.fixture(scope="session")
def llama_model(build_shared):
    """Llama 3.1 8B for 4096 tokens, without weights."""
    from shardplan.model.huggingface.hf_config import read_config

    return build_shared(read_config(LLAMA_CONFIG, None), 4096)


@pytest.fixture
def llama_config(make_config):
    """Makes a configuration for `llama_model` on v4-64 with batch 8, unless overrides change that."""

    def make(pin=(), forbid=(), **overrides):
        settings = {"model_config": LLAMA_CONFIG, "hardware_slice": "v4-64", "workload_batch": 8}
        config = make_config(**{**settings, "workload_position": 4096, **overrides})
        return dataclasses.replace(config, pin=pin, forbid=forbid)

    return make


@pytest.fixture(scope="session")
def checkpoint(golden, tmp_path_factory) -> Path:
    """The golden Llama, its tokens as text, and a tokenizer that maps the words t0 ... t255 to the tokens 0 ... 255."""
    return with_text(golden / "llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="session")
def expert_checkpoint(golden, tmp_path_factory) -> Path:
    """The same of the golden Qwen3 MoE, which has 72 tokens."""
    return with_text(golden.with_name("families") / "qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "qwen3_moe")


def with_text(source: Path, folder: Path) -> Path:
    """Copy a golden checkpoint to a folder with its tokens as text, and with their tokenizer."""
    shutil.copytree(source, folder)
    word_tokenizer(0).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokens = np.load(folder / "golden.npz")["tokens"]
    rows = [{"id": f"row {i}", "text": " ".join(f"t{t}" for t in row)} for i, row in enumerate(tokens)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def word_tokenizer(first: int) -> Tokenizer:
    """A tokenizer of the words t0 ... t255, numbered from `first` on."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": first + i for i in range(256)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def transformers_losses(folder: Path) -> np.ndarray:
    """float64[document, token] negative log-likelihoods from the golden logits of transformers."""
    golden = np.load(folder / "golden.npz")
    name = "logits" if "logits" in golden else "logits_float64"  # of the decoder's families
    logits = golden[name].astype(np.float64)[:, :-1]
    normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(normalised, golden["tokens"][:, 1:, None].astype(int), -1)[..., 0]


def start(*argv):
    """`python -m shardplan.<argv>`, from the repository's root, in a process of its own."""
    process = fork_python(["-m", f"shardplan.{argv[0]}", *argv[1:]])
    out, err = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def run(*argv):
    """The same within this process, which has imported JAX already, and has eight devices."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv[0], [*map(str, argv[1:])])
    gc.enable()  # which commands that plan switch off
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def work_of(function) -> int:
    """Count the calls and iterations of Python code within a function: the same number on a busy machine."""
    monitoring, counter, count = sys.monitoring, sys.monitoring.PROFILER_ID, 0
    events = monitoring.events
    counted = [events.CALL, events.JUMP, events.PY_START, events.PY_RESUME]

    def add(*_):
        nonlocal count
        count += 1

    monitoring.use_tool_id(counter, "work_of")
    try:
        for event in counted:
            monitoring.register_callback(counter, event, add)
        monitoring.set_events(counter, sum(counted))
        function()
    finally:
        monitoring.set_events(counter, 0)
        monitoring.free_tool_id(counter)
    return count


def fails(done, code: int, message: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("shardplan ")]
    assert len(lines) == 1 and message in lines[0], done.stderr
    assert done.stdout == ""
