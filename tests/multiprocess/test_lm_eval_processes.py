"""Tasks of lm_eval in two processes of four devices each: both have all requests, and process 0 reports."""

import json
import os
import re

import pytest
from compare_lm_eval import FOLDER, largest_differences, make_checkpoint
from conftest import ROOT
from processes import fork_python
from test_eval import TIMEOUT, free_port


def run_processes(tmp_path, *settings):
    """(exit code, stdout, stderr) of two processes, each with its arguments of `lm_eval.simple_evaluate`."""
    address, checkpoint = f"127.0.0.1:{free_port()}", make_checkpoint("llama", tmp_path / "llama")
    processes = [
        fork_python(
            ["tests/multiprocess/lm_eval_worker.py", checkpoint, json.dumps(settings[number])],
            PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
            JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(number),
            HF_DATASETS_CACHE=str(tmp_path / f"datasets {number}"),
        )
        for number in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_two_processes_have_the_results_of_hf(tmp_path):
    settings = {"use_cache": str(tmp_path / "cache")}
    first, second = run_processes(tmp_path, settings, settings)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    result, expected = json.loads(first[1]), json.loads((FOLDER / "llama" / "hf.json").read_text())
    assert json.loads(second[1]) == {}
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-4)
    differences = largest_differences(result, expected)
    assert differences["greedy"] == 0 and differences["continuations"] < 63 * 2e-5
    assert first[2].count("forward programs compiled so far: 1 (") == 2 and "forward programs" not in second[2]
    assert sorted(path.name for path in tmp_path.glob("cache_rank*")) == ["cache_rank0.db", "cache_rank1.db"]


@pytest.mark.whole
def test_processes_with_other_requests(tmp_path):
    for code, _, errors in run_processes(tmp_path, {}, {"limit": 3}):
        assert code == 2, errors
        assert re.search(r"requests is (\w{64}) in process 1 and (?!\1)\w{64} in process 0; give all the same", errors)
