"""lm_eval's own tasks on golden checkpoints: the results of its `hf` model, whatever the mesh and the packing.

The references are made by scripts/make_lm_eval_reference.py, with torch; lm_eval itself does not need it.
"""

import json
import re
import shlex
import subprocess
import sys
from functools import partialmethod

import jax
import numpy as np
import pytest
from compare_lm_eval import FAMILIES, FOLDER, TASKS, evaluate, largest_differences, make_checkpoint, model_args
from conftest import ROOT, fails, run

from shardplan.errors import CheckpointError, ConfigError
from shardplan.eval.harness import INSTALL_LM_EVAL, ShardplanLM
from shardplan.eval.harness.tasks import flatten_tasks
from shardplan.runtime.processes.watch.watch import Watch

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
    # contexts of the last documents are longer than 63 tokens
    assert list(model.get_model_info()["requests_truncated"]) == [CHOICES]
    # a continuation has up to 63 tokens, a document 1,000
    assert differences["continuations"] < 63 * 2e-5 and differences["documents"] < 1000 * 2e-5
    for own, other in zip(result["requests"][CHOICES], expected["requests"][CHOICES], strict=True):
        np.testing.assert_allclose([x for x, _ in own], [x for x, _ in other], rtol=2e-5, atol=2e-5)
    assert capsys.readouterr().err.count("forward programs compiled so far: 1 (") == 2
    check_joins(model, json.loads((FOLDER / family / "hf_requests.json").read_text(encoding="utf-8"))["joins"], capsys)
    info = model.get_model_info()
    assert info["programs_compiled"] == 1 and info["plan"]["workload"]["kind"] == "score"


def check_joins(model, expected, capsys):
    """Contexts and continuations that meet within a word have the results of `hf`.

    Where it would end, because no token begins after the context, the continuation is encoded by itself.
    """
    before = model.get_model_info()
    requests = as_requests([(each["context"], each["continuation"]) for each in expected], "joins")
    results = model.loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in results] == [each["result"][1] for each in expected]
    np.testing.assert_allclose([x for x, _ in results], [each["result"][0] for each in expected], rtol=2e-5, atol=2e-5)
    # a context of spaces is no context at all, which a tokenizer without BOS has no token for
    spaces = [each["is_alone"] for each in expected if each["context"] == "  "] == [True]
    alone = sum(each["is_alone"] for each in expected) - spaces
    notes = capsys.readouterr().err
    assert alone > 3 and f"{alone} of {len(expected)} requests had no token that begins after the context" in notes
    assert f"1 of {len(expected)} requests had contexts that lost their beginnings, because max_length is 63" in notes
    assert ("had contexts without tokens (spaces alone)" in notes) == spaces
    info = model.get_model_info()
    assert info["requests_continuation_encoded_alone"] == {"joins": alone}
    assert info["requests_truncated"] == {**before["requests_truncated"], "joins": 1}


def texts():
    rows = [json.loads(line) for line in (FOLDER / "choices.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["query"], f" {choice}") for row in rows for choice in row["choices"]]


def as_requests(arguments, task=None):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, i, (task, i, 1)) for i, each in enumerate(arguments)]


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


def test_requests_that_cannot_be_scored_name_their_task(make_model, raises_message):
    model = make_model("gpt2")
    with raises_message(ConfigError):
        model.loglikelihood(as_requests([("a", "")], "joins"), disable_tqdm=True)
    with raises_message(ConfigError):
        model.loglikelihood(as_requests([("", "")], "joins"), disable_tqdm=True)
    with raises_message(ConfigError):
        model.loglikelihood(as_requests([("a", " b" * 80)], "joins"), disable_tqdm=True)
    assert model._scorer is None


def test_prompts_of_chats_are_those_of_hf(make_model, caplog):
    """Also where the template refuses system messages."""
    for family in FAMILIES:
        expected = json.loads((FOLDER / family / "hf_requests.json").read_text(encoding="utf-8"))["chats"]
        model = make_model(family)
        for each in expected:
            model.tokenizer.chat_template = each["template"]
            assert model.apply_chat_template(each["messages"]) == each["prompt"]
        # said once, not for every document
        (record,) = [each for each in caplog.records if "refuses system messages" in each.message]
        assert "System role not supported" in record.message
        # a prompt that begins with the BOS token gets no second one
        bos, prompt = model.tokenizer.bos_token_id, expected[0]["prompt"]
        assert prompt.startswith(model.tokenizer.bos_token) and model.tok_encode(prompt).count(bos) == 1
        caplog.clear()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "llama has no chat template; leave --apply_chat_template out, or save one there as chat_template.jinja"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses messages with the roles user: roles must alternate;",
        ),
        ("{{ messages | nothing }}", "refuses messages with the roles user: No filter named 'nothing'."),
        ("{{ messages[0].content + 1 }}", "refuses messages with the roles system, user: can only concatenate str"),
    ],
)
def test_chat_templates_that_cannot_be_used(make_model, template, message):
    model = make_model("llama")
    model.tokenizer.chat_template = template
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it free?"}]
    with pytest.raises(ConfigError) as error:
        model.apply_chat_template(chat)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_chat_template_of_another_name(make_model):
    model = make_model("llama")
    model.tokenizer.chat_template = {"default": "a", "tools": "b"}
    with pytest.raises(ConfigError, match="apply_chat_template: The specified chat template 'tool' is not available"):
        model.chat_template("tool")
    assert model.chat_template("tools") == "b"


def test_variables_of_the_chat_template(make_model):
    model = make_model("llama", chat_template_args={"mood": "calm"}, enable_thinking=False)
    model.tokenizer.chat_template = "{{ mood }} {{ enable_thinking }} {{ messages[0].content }}"
    assert model.apply_chat_template([{"role": "user", "content": "Hi"}]) == "calm False Hi"


def test_arguments_of_hf(make_model, tmp_path):
    """`pretrained` and `dtype` instead of the keys, and the tokenizer of another folder."""
    arguments = {"model.ref": None, "workload.param_dtype": None, "workload.compute_dtype": None}
    other = make_checkpoint("gpt2", tmp_path / "other")
    model = make_model("llama", **arguments, pretrained=str(tmp_path / "llama"), dtype="float32", tokenizer=str(other))
    assert model._settings.model.ref == str(tmp_path / "llama")
    work = model._settings.workload
    assert (work.param_dtype, work.compute_dtype) == ("float32", "float32")
    assert model.tokenizer.bos_token == "<|endoftext|>"


def test_documents_without_tokens(make_model):
    assert make_model("gpt2").loglikelihood_rolling(as_requests([("",)])) == [0.0]


def write_task(folder, name, **settings):
    """Write a task of generation with the documents of the multiple choice; settings override it."""
    task = {
        "task": name, "dataset_path": "json", "test_split": "test", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(FOLDER / "choices.jsonl")}},
        "doc_to_text": "{{query}}", "doc_to_target": "{{choices[answer]}}", "metric_list": [{"metric": "exact_match"}],
        **settings,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task))


OWN_REQUESTS = """
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

class Both(ConfigurableTask):
    def __init__(self, config):
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc, ctx, **kwargs):
        kwargs = {"metadata": kwargs["metadata"]}
        first = Instance("loglikelihood", doc, (ctx or "a", " b"), 0, **kwargs)
        return [first, Instance(SECOND, doc, (ctx or "a", " c"), 1, **kwargs)]

    def process_results(self, doc, results):
        return {"acc": results[0][0] < 0}
"""
"""A task whose requests its output type, which is that of generation, does not tell."""


def test_tasks_that_cannot_be_run_are_left_out(make_model, tmp_path, caplog, raises_message):
    """Before anything is loaded; the others have the results that they have alone."""
    import lm_eval
    from lm_eval.tasks import TaskManager, get_task_dict

    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_task(tasks, "writes")
    for name, second in (("scores_twice", "loglikelihood"), ("scores_and_writes", "generate_until")):
        (tasks / f"{name}.py").write_text(OWN_REQUESTS.replace("SECOND", repr(second)))
        write_task(tasks, name, metric_list=[{"metric": "acc"}])
        (tasks / f"{name}.yaml").write_text(
            f"class: !function {name}.Both\n"
            + "\n".join(
                f"{key}: {json.dumps(value)}" for key, value in json.loads((tasks / f"{name}.yaml").read_text()).items()
            )
        )
    (tasks / "group.yaml").write_text(
        json.dumps({"group": "both", "task": [CHOICES, "writes"], "aggregate_metric_list": [{"metric": "acc"}]})
    )
    manager = TaskManager(include_path=[str(FOLDER), str(tasks)], include_defaults=False)
    model = make_model("gpt2")
    common = {"model": model, "task_manager": manager, "bootstrap_iters": 0}
    with raises_message(ConfigError):
        lm_eval.simple_evaluate(tasks=["writes", "scores_and_writes"], **common)
    assert model._session is None
    result = lm_eval.simple_evaluate(tasks=["both", "scores_and_writes", "scores_twice"], **common)
    assert set(result["results"]) == {CHOICES, "scores_twice"}
    expected = json.loads((FOLDER / "gpt2" / "hf.json").read_text())["metrics"]
    assert result["results"][CHOICES]["brier_score,none"] == pytest.approx(expected[f"{CHOICES} brier_score"], rel=1e-4)
    assert result["config"]["tasks_left_out"] == {"writes": "generate_until", "scores_and_writes": "generate_until"}
    # the nested form that lm_eval.evaluate takes, too
    nested = get_task_dict(["both", "scores_twice"], manager)
    for task in flatten_tasks(nested)["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    again = lm_eval.evaluate(model, nested, bootstrap_iters=0)
    assert again["results"] == result["results"]
    messages = [record.message for record in caplog.records]
    assert "left out, because shardplan only scores texts: writes and scores_and_writes (generate_until)" in messages
    assert "no result of the group both, of which tasks are left out" in messages


def test_generation_is_refused(make_model, raises_message):
    with raises_message(ConfigError):
        make_model("gpt2").generate_until(as_requests([("a", {})]))


def test_a_checkpoint_without_a_tokenizer(golden, tmp_path, raises_message):
    with raises_message(CheckpointError):
        ShardplanLM(**{"model.ref": str(golden / "llama")})


def documented_command():
    """The arguments of the command on the page about lm_eval that runs the tasks of this folder."""
    page = (ROOT / "docs" / "howto" / "lm-eval.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^shardplan lm_eval .*--include_path.*$", page, re.MULTILINE)
    return shlex.split(line)[2:]


def test_the_documented_command(tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    # to read the thousands of tasks of lm_eval itself takes ten times as long as to run the two of this folder
    without_defaults = partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", without_defaults)
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    argv = documented_command()
    at = argv.index("--model_args") + 1
    argv[at] += f",model.ref={checkpoint},workload.param_dtype=float32,workload.position=64,workload.batch=16"
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_task(tasks, "writes")
    argv[argv.index("--tasks") + 1] += f",{tasks / 'writes.yaml'}"
    done = run("lm_eval", *argv, "--output_path", tmp_path / "results")
    # the others have their results
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    message = "the results lack tasks that were left out: writes (generate_until); run these with another model"
    assert done.stderr.splitlines()[-1] == f"shardplan lm_eval: {message}"
    expected = json.loads((FOLDER / "llama" / "hf.json").read_text())["metrics"]
    for name in expected:
        task, metric = name.split()
        assert task in done.stdout and metric in done.stdout
    (path,) = (tmp_path / "results").rglob("*.json")
    results = json.loads(path.read_text())
    measured = {name: results["results"][name.split()[0]][f"{name.split()[1]},none"] for name in expected}
    assert measured == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert results["config"]["tasks_left_out"] == {"writes": "generate_until"}
    assert "forward programs compiled so far: 1 (" in done.stderr
    assert sys.argv[0] != "lm_eval"


def test_a_wrong_argument(raises_message):
    with raises_message(ConfigError):
        ShardplanLM.create_from_arg_string("model.config=llama-3.1-8b,mesh.modle=2")


def test_the_command_without_lm_eval():
    code = (
        "import sys; sys.modules['lm_eval'] = None; from shardplan.__main__ import main; sys.exit(main('lm_eval', []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    fails(done, 2, f"lm_eval is not installed, which this needs: {INSTALL_LM_EVAL}")
