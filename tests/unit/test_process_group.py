"""Messages of a process group whose processes do not answer, fail, or disagree."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from shardplan.checkpoint.format.shared_index import read_shared_index
from shardplan.checkpoint.transfer.stream import agree_on_tuning
from shardplan.errors import CheckpointError, ConfigError, PeerError
from shardplan.runtime import process_group
from shardplan.runtime.process_group import ProcessGroup, ProcessState
from shardplan.storage import open_folder
from shardplan.storage.folder import ReadTuning

FILE = "model.safetensors"


@pytest.fixture
def group(monkeypatch):
    """Process 0 of four, with a key-value store in memory."""
    store = {}
    processes = ProcessGroup("test")
    processes.process_index, processes.process_count = 0, 4
    monkeypatch.setattr(processes, "_set", store.__setitem__)
    monkeypatch.setattr(
        processes,
        "_get_all",
        lambda key: {int(name.rpartition("/")[2]): text for name, text in store.items() if name.startswith(f"{key}/")},
    )
    return processes, store


@pytest.mark.parametrize(("present", "missing"), [((1, 3), "process 2"), ((1,), "processes 2, 3")])
def test_timeout_names_the_missing_processes(group, present, missing):
    processes, store = group
    store.update({f"checkpoint/{process}": "null" for process in (0, *present)})
    with pytest.raises(PeerError, match=f"^timed out after 0 s waiting for 'checkpoint'; no message from {missing}$"):
        processes._wait_for_all("checkpoint", 0.1)


def test_exchange_returns_the_messages_for_this_process(group):
    processes, store = group
    for process in (1, 2, 3):
        store[f"parts for 0/{process}"] = json.dumps(process * 10)
        store[f"parts/{process}"] = "null"
    assert processes.exchange("parts", {0: 5, 1: 6, 2: 7, 3: 8}) == {0: 5, 1: 10, 2: 20, 3: 30}
    assert store["parts for 3/0"] == "8"


def test_a_value_of_process_0_is_sent_to_all(group):
    processes, _ = group
    assert processes.broadcast("value", lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    processes.process_index = 3
    assert processes.broadcast("value", lambda: pytest.fail("only process 0 computes it")) == {"a": [1, 2]}


def test_an_error_of_process_0_is_sent_to_all(group):
    processes, store = group
    for process in (1, 2, 3):
        store[f"value received/{process}"] = ""

    def fail():
        raise CheckpointError("no such file")

    with pytest.raises(CheckpointError, match=r"^no such file$"):
        processes.broadcast("value", fail)
    processes.process_index = 1
    with pytest.raises(CheckpointError, match=r"^process 0: no such file$"):
        processes.broadcast("value", fail)


class Shared:
    """A shared folder that counts what is opened."""

    ref = "s3://models/llama"

    def __init__(self, path):
        self.folder, self.opened = open_folder(str(path)), []

    def open(self, name):
        self.opened.append(name)
        file = self.folder.open(name)
        if file is not None:
            file.is_shared = True
        return file


def test_headers_of_shared_files_are_read_by_process_0(group, tmp_path):
    """The others open a file when they first read from it, and find out if it is another one."""
    processes, _ = group
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), ml_dtypes.bfloat16)}, tmp_path / FILE)
    folder = Shared(tmp_path)
    own = read_shared_index(folder, processes)
    assert folder.opened == ["model.safetensors.index.json", FILE]
    processes.process_index, other = 2, Shared(tmp_path)
    received = read_shared_index(other, processes)
    assert not other.opened
    for name, tensor in own.items():
        same = received[name]
        assert (same.offset, same.shape, same.dtype) == (tensor.offset, tensor.shape, tensor.dtype)
        assert (same.file.size, same.file.version, same.file.tuning) == (
            tensor.file.size, tensor.file.version, tensor.file.tuning
        )  # fmt: skip
    data = bytearray(24)
    received["a"].file.read_into(received["a"].offset, memoryview(data))
    assert np.frombuffer(data, np.float32).tolist() == [0, 1, 2, 3, 4, 5] and other.opened == [FILE]
    save_file({"a": np.zeros(6, np.float32), "b": np.ones((2, 3), ml_dtypes.bfloat16)}, tmp_path / FILE)
    late = read_shared_index(Shared(tmp_path), processes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was being read \(.* here\)"):
        late["a"].file.read_into(0, memoryview(data))
    (tmp_path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"process 0 reads this file, here it is missing"):
        read_shared_index(Shared(tmp_path), processes)["a"].file.read_into(0, memoryview(data))


def test_headers_of_copies_are_read_by_every_process(group, tmp_path):
    processes, _ = group
    save_file({"a": np.arange(6, dtype=np.float32)}, tmp_path / FILE)
    for processes.process_index in (0, 1):
        [tensor] = read_shared_index(open_folder(str(tmp_path)), processes).values()
        assert tensor.file.name == str(tmp_path / FILE)


def test_all_processes_read_alike_where_one_has_the_files_in_its_cache(group):
    """Read schedules depend on the size and number of reads, and must be equal in all processes."""
    processes, store = group
    own, others = ReadTuning(2**24, 32), [[[2**22, 4]], [[2**22, 96], [2**24, 32]], [[2**24, 32]]]
    for process, tunings in enumerate(others, 1):
        store[f"tuning/{process}"] = json.dumps(tunings)
    assert agree_on_tuning({own}, processes) == ReadTuning(2**22, 96)


def test_different_values_are_an_error_that_names_the_part(group):
    processes, store = group
    for process in (1, 2, 3):
        store[f"checkpoint/{process}"] = json.dumps({"parts": {"a.bin": "v2" if process == 2 else "v1"}})
        store[f"checkpoint received/{process}"] = ""
    with pytest.raises(CheckpointError, match=r"^process 2 reads a different a\.bin than process 0; make all"):
        processes.agree("checkpoint", lambda: None, lambda _: {"a.bin": "v1"})


def test_error_of_another_process_keeps_its_class(group):
    processes, store = group
    for process in (1, 2, 3):
        store[f"checkpoint/{process}"] = json.dumps({"error": "no such folder", "kind": "ConfigError"})
        store[f"checkpoint received/{process}"] = ""
    with pytest.raises(ConfigError, match=r"^process 1: no such folder$"):
        processes.agree("checkpoint", lambda: None, lambda _: {})


@pytest.mark.parametrize("problem", ["", "running", "no memory"])
def test_last_heartbeat_reports_the_problem(group, monkeypatch, problem):
    processes, store = group
    exits = []
    monkeypatch.setattr(process_group, "_exit", exits.append)
    processes.finish(problem)
    heartbeat = json.loads(store["alive/0"])
    assert heartbeat["state"] == (ProcessState.FAILED if problem else ProcessState.FINISHED)
    processes._handle_heartbeat(0, heartbeat)
    assert exits == ([f"process 0 of 4 failed: {problem}"] if problem else [])
