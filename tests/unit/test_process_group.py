"""What the processes of a group exchange, agree on, or disagree about."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from shardplan.checkpoint import session
from shardplan.checkpoint.format.shared_index import read_shared_index
from shardplan.config import parse_config
from shardplan.errors import CheckpointError, ConfigError
from shardplan.runtime.processes.group import ProcessGroup
from shardplan.runtime.processes.hub.messages import MessageKind
from shardplan.runtime.processes.link import Link
from shardplan.runtime.processes.watch.activity import Activity
from shardplan.search.make_plan import make_plan
from shardplan.storage import open_folder

FILE = "model.safetensors"


class Answers(Link):
    """A link whose answers are known; process 0 sends its values to the others."""

    def __init__(self):
        self.activity, self.answers = Activity(), {}

    def send(self, kind, name, **values):
        if kind is MessageKind.BROADCAST and values:
            self.answers[kind, name] = values

    def wait_for(self, kind, name):
        return self.answers[kind, name]

    def set_activity(self, activity):
        self.activity = activity


@pytest.fixture
def group():
    """Process 0 of four, and the answers that it gets."""
    link = Answers()
    processes = ProcessGroup("test", link)
    processes.process_index, processes.process_count = 0, 4
    return processes, link.answers


def test_exchange_returns_the_messages_for_this_process(group):
    processes, answers = group
    answers[MessageKind.EXCHANGE, "test/parts"] = {"values": {"0": 5, "3": 30}}
    assert processes.exchange("parts", {0: 5, 2: 7}) == {0: 5, 3: 30}
    assert ProcessGroup("test", None).exchange("parts", {0: 5}) == {0: 5}


def test_a_value_of_process_0_is_sent_to_all(group):
    processes, _ = group
    assert processes.broadcast("value", lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    processes.process_index = 3
    assert processes.broadcast("value", lambda: pytest.fail("only process 0 computes it")) == {"a": [1, 2]}


def test_an_error_of_process_0_is_sent_to_all(group):
    processes, _ = group

    def fail():
        raise CheckpointError("no such file")

    with pytest.raises(CheckpointError, match=r"^no such file$") as own:
        processes.broadcast("value", fail)
    processes.process_index = 1
    with pytest.raises(CheckpointError, match=r"^process 0: no such file$") as other:
        processes.broadcast("value", fail)
    assert own.value.is_shared and other.value.is_shared


def test_phases_are_numbered_alike(group):
    """Whatever was entered before, the number of a phase increases, and is that of the same phase elsewhere."""
    processes, _ = group
    link, numbers = processes.watch, []
    for _ in range(2):
        with processes.phase("loading", 30.0) as advance:
            advance(7)
            assert (link.activity.phase, link.activity.done, link.activity.deadline_s) == ("loading", 7, 30.0)
            numbers.append(link.activity.number)
        numbers.append(link.activity.number)
        assert (link.activity.phase, link.activity.done) == ("starting", 0)
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_phases_in_a_phase(group):
    """What is done after it counts as later than it, as in processes that have done nothing since."""
    processes, _ = group
    link = processes.watch
    with processes.phase("training", 30.0) as advance:
        with processes.phase("saving", 30.0):
            inside = link.activity.number
        after = link.activity.number
        advance(7)
        assert (link.activity.phase, link.activity.number) == ("training", after) and after > inside


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


def test_headers_of_shared_files_are_read_by_process_0(group, tmp_path, raises_message):
    """The others open a file when they first read from it, and find out if it is another one."""
    processes, _ = group
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), ml_dtypes.bfloat16)}, tmp_path / FILE)
    folder = Shared(tmp_path)
    own = read_shared_index(folder, processes)
    assert folder.opened == ["model.safetensors.index.json", FILE]
    processes.process_index, other = 2, Shared(tmp_path)
    received = read_shared_index(other, processes)
    assert not other.opened
    for name, tensor in own.tensors.items():
        same = received.tensors[name]
        assert (same.offset, same.shape, same.dtype) == (tensor.offset, tensor.shape, tensor.dtype)
        assert (same.file.size, same.file.version, same.file.tuning) == (
            tensor.file.size, tensor.file.version, tensor.file.tuning
        )  # fmt: skip
    data = bytearray(24)
    received.tensors["a"].file.read_into(received.tensors["a"].offset, memoryview(data))
    assert np.frombuffer(data, np.float32).tolist() == [0, 1, 2, 3, 4, 5] and other.opened == [FILE]
    save_file({"a": np.zeros(6, np.float32), "b": np.ones((2, 3), ml_dtypes.bfloat16)}, tmp_path / FILE)
    late = read_shared_index(Shared(tmp_path), processes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was being read \(.* here\)"):
        late.tensors["a"].file.read_into(0, memoryview(data))
    (tmp_path / FILE).unlink()
    with raises_message(CheckpointError):
        read_shared_index(Shared(tmp_path), processes).tensors["a"].file.read_into(0, memoryview(data))


def test_headers_of_copies_are_read_by_every_process(group, tmp_path):
    processes, _ = group
    save_file({"a": np.arange(6, dtype=np.float32)}, tmp_path / FILE)
    for processes.process_index in (0, 1):
        [tensor] = read_shared_index(open_folder(str(tmp_path)), processes).tensors.values()
        assert tensor.file.name == str(tmp_path / FILE)


def test_different_values_are_an_error_that_names_the_part(group, raises_message):
    processes, answers = group
    answers[MessageKind.AGREE, "test/checkpoint"] = {"process": 2, "part": "a.bin", "values": ["v2", "v1"]}
    with raises_message(CheckpointError):
        processes.agree("checkpoint", lambda: None, lambda _: {"a.bin": "v1"})


def test_errors_of_a_process_keep_their_class_in_all(group):
    processes, answers = group
    problem = {"error": "ConfigError", "text": "no such folder"}
    answers[MessageKind.AGREE, "test/checkpoint"] = {"process": 1, "problem": problem}
    with pytest.raises(ConfigError, match=r"^process 1: no such folder$"):
        processes.agree("checkpoint", lambda: None, lambda _: {})

    def fail():
        raise ConfigError("no such folder")

    processes.process_index = 1
    with pytest.raises(ConfigError, match=r"^no such folder$") as own:
        processes.agree("checkpoint", fail, lambda _: {})
    assert own.value.is_shared


def test_process_0_plans_for_hosts_with_other_memory(group, golden):
    """On the host of process 1 nothing would fit; it takes the plan of process 0, and both compare what they have."""
    processes, answers = group
    answers[MessageKind.AGREE, "test/own plan"] = {}
    plan = make_plan(parse_config([f"--model.ref={golden / 'llama'}", "--workload.position=64"]))
    assert session.agree_on_plan(processes, None, lambda: plan, lambda _: None) == plan
    answers[MessageKind.BROADCAST, "test/plan"] = json.loads(json.dumps(answers[MessageKind.BROADCAST, "test/plan"]))
    processes.process_index = 1
    checked = []
    make = lambda: pytest.fail("process 1 makes no plan")  # noqa: E731
    assert session.agree_on_plan(processes, None, make, checked.append) == plan and checked == [plan]


def test_another_plan_file_than_that_of_process_0(group, golden, raises_message):
    """The values of both are shown, for what decides the programs, which attention does too."""
    plan = make_plan(parse_config([f"--model.ref={golden / 'llama'}", "--workload.position=64"]))
    processes, answers = group
    answers[MessageKind.BROADCAST, "test/plan"] = {"value": plan.to_json()}
    answers[MessageKind.AGREE, "test/own plan"] = {"process": 1, "part": "attention", "values": ["b", "a"]}
    processes.process_index = 1
    with raises_message(ConfigError):
        session.agree_on_plan(processes, plan, lambda: pytest.fail("a plan is given"), lambda _: None)
