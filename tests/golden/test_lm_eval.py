"""lm_eval's own tasks on golden checkpoints: the results of its `hf` model, whatever the mesh and the packing.

The references are made by scripts/make_lm_eval_reference.py, with torch; lm_eval itself does not need it.
"""

import json
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
from compare_lm_eval import FAMILIES, FOLDER, TASKS, evaluate, largest_differences, make_checkpoint, model_args
from conftest import ROOT, fails, run

from shardplan.errors import ConfigError
from shardplan.eval.harness import INSTALL_LM_EVAL, ShardplanLM
from shardplan.runtime.processes.watch import Watch

CHOICES, DOCUMENTS = TASKS


@pytest.fixture(autouse=True)
def local_data(monkeypatch, tmp_path):
    """What lm_eval reads and keeps is in this repository and in a folder of the test."""
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def make_model(tmp_path):
    """Make a model from a golden checkpoint, with arguments that override those of scripts/compare_lm_eval.py."""

    def make(family, **overrides):
        checkpoint = tmp_path / family
        if not checkpoint.exists():
            make_checkpoint(family, checkpoint)
        arguments = {**model_args(family, checkpoint), **overrides}
        return ShardplanLM(**{name: value for name, value in arguments.items() if value is not None})

    return make


class Compilations:
    """The programs that JAX compiles, counted by name."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_have_the_results_of_hf(make_model, family, capsys):
    expected = json.loads((FOLDER / family / "hf.json").read_text())
    model = make_model(family)
    result = evaluate(model)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-4)
    differences = largest_differences(result, expected)
    assert differences["greedy"] == 0
    # a continuation has up to 63 tokens, a document 1,000
    assert differences["continuations"] < 63 * 2e-5 and differences["documents"] < 1000 * 2e-5
    for own, other in zip(result["requests"][CHOICES], expected["requests"][CHOICES], strict=True):
        np.testing.assert_allclose([x for x, _ in own], [x for x, _ in other], rtol=2e-5, atol=2e-5)
    assert capsys.readouterr().err.count("forward programs compiled so far: 1 (") == 2
    info = model.get_model_info()
    assert info["programs_compiled"] == 1 and info["plan"]["workload"]["kind"] == "score"


def texts():
    rows = [json.loads(line) for line in (FOLDER / "choices.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["query"], f" {choice}") for row in rows for choice in row["choices"]]


def as_requests(arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, i) for i, each in enumerate(arguments)]


def test_results_do_not_depend_on_the_packing(make_model):
    """Requests in other rows, in another order, one by one, and on another mesh; no call compiles anything anew."""
    requests = as_requests(texts())
    model = make_model("llama", **{"workload.batch": 8})
    together = model.loglikelihood(requests, disable_tqdm=True)
    compilations = Compilations()
    backwards = model.loglikelihood(requests[::-1], disable_tqdm=True)[::-1]
    alone = [model.loglikelihood([request], disable_tqdm=True)[0] for request in requests[::6]]
    assert compilations.count == 0
    other = {"workload.position": 200, "workload.batch": 3, "mesh.data": 1, "mesh.replica": 1, "mesh.model": 8}
    longer_rows = make_model("llama", **other).loglikelihood(requests, disable_tqdm=True)
    assert compilations.count > 0
    for same, expected in ((backwards, together), (longer_rows, together), (alone, together[::6])):
        for (log_prob, is_greedy), (other_log_prob, other_is_greedy) in zip(same, expected, strict=True):
            assert log_prob == pytest.approx(other_log_prob, rel=2e-5, abs=2e-5) and is_greedy == other_is_greedy


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_continuations(golden, make_model, family):
    """By the logits of transformers: the most probable token is greedy, and any other one is not."""
    reference = np.load(golden / family / "golden.npz")
    model = make_model(family)
    requests, expected = [], []
    for ids, logits in zip(reference["tokens"].tolist(), reference["logits"].astype(np.float64), strict=True):
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for length in range(1, 60, 7):
            best = int(logits[length - 1].argmax())
            for token in (best, (best + 1) % 256):
                requests.append((("", ""), ids[:length], [token]))
                expected.append((log_probs[length - 1, token], token == best))
    results = model._loglikelihood_tokens(requests)
    assert [is_greedy for _, is_greedy in results] == [is_greedy for _, is_greedy in expected]
    np.testing.assert_allclose([x for x, _ in results], [x for x, _ in expected], atol=2e-5)


def test_the_cache_keeps_results(make_model, tmp_path):
    from lm_eval.api.model import CachingLM

    model = make_model("gpt2")
    cached = CachingLM(model, str(tmp_path / "cache.db"))
    requests = as_requests(texts()[:4])
    first = cached.loglikelihood(requests)
    steps = model._scorer.statistics.steps
    assert cached.loglikelihood(requests) == first and model._scorer.statistics.steps == steps


def test_scoring_is_watched(make_model, monkeypatch):
    """By its steps, whose deadline follows from the plan: it may go on for hours."""
    seen, set_activity = [], Watch.set_activity

    def record(watch, activity):
        seen.append(activity)
        set_activity(watch, activity)

    monkeypatch.setattr(Watch, "set_activity", record)
    model = make_model("gpt2")
    model.loglikelihood(as_requests(texts()))
    scoring = [each for each in seen if each.phase == "scoring"]
    assert len(scoring) == 1 + model._scorer.statistics.steps > 2
    assert scoring[-1].done == len(texts()) and {each.deadline_s for each in scoring} == {300.0}
    assert "compiling" in {each.phase for each in seen}


def test_tokens_are_those_of_hf(make_model):
    """With the BOS token once, whether the tokenizer, an argument or the text itself adds it."""
    llama = make_model("llama")
    begin = llama.prefix_token_id
    assert llama.tok_encode("free")[0] == begin and begin not in llama.tok_encode("free")[1:]
    assert llama.tok_encode("<s>free").count(begin) == 1
    assert begin not in llama.tok_encode("free", add_special_tokens=False)
    assert make_model("gpt2", prefix_token_id=7).prefix_token_id == 7


def test_documents_without_tokens(make_model):
    assert make_model("gpt2").loglikelihood_rolling(as_requests([("",)])) == [0.0]


def test_generation_is_refused(make_model):
    with pytest.raises(ConfigError, match="shardplan scores texts and does not generate any; leave out tasks whose"):
        make_model("gpt2").generate_until(as_requests([("a", {})]))


def test_a_checkpoint_without_a_tokenizer(golden, tmp_path):
    with pytest.raises(Exception, match="llama has no tokenizer; save one there with transformers"):
        ShardplanLM(**{"model.ref": str(golden / "llama")})


def documented_command():
    """The arguments of the command on the page about lm_eval that runs the tasks of this folder."""
    page = (ROOT / "docs" / "howto" / "lm-eval.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^shardplan lm_eval .*--include_path.*$", page, re.MULTILINE)
    return shlex.split(line)[2:]


def test_the_documented_command(tmp_path):
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    argv = documented_command()
    at = argv.index("--model_args") + 1
    argv[at] += f",model.ref={checkpoint},workload.param_dtype=float32,workload.position=64,workload.batch=16"
    done = run("lm_eval", *argv, "--output_path", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    expected = json.loads((FOLDER / "llama" / "hf.json").read_text())["metrics"]
    for name in expected:
        task, metric = name.split()
        assert task in done.stdout and metric in done.stdout
    (path,) = (tmp_path / "results").rglob("*.json")
    results = json.loads(path.read_text())
    measured = {name: results["results"][name.split()[0]][f"{name.split()[1]},none"] for name in expected}
    assert measured == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert "forward programs compiled so far: 1 (" in done.stderr
    assert sys.argv[0] != "lm_eval"


def test_a_wrong_argument():
    with pytest.raises(ConfigError, match=r"model_args: unknown key 'mesh\.modle'; did you mean 'mesh\.model'\?"):
        ShardplanLM.create_from_arg_string("model.config=llama-3.1-8b,mesh.modle=2")


def test_the_command_without_lm_eval():
    code = (
        "import sys; sys.modules['lm_eval'] = None; from shardplan.__main__ import main; sys.exit(main('lm_eval', []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    fails(done, 2, f"lm_eval is not installed, which this needs: {INSTALL_LM_EVAL}")
