"""Files of Levanter configurations are told from others, and a file that cannot be read is reported on one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardplan.errors import ConfigError
from shardplan.levanter_config.levanter_file import is_levanter_config, read_levanter_file
from shardplan.levanter_config.trainer_section import parse_trainer_section


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: "),
        (b"\xff\xfe", "cannot be read: "),
        (b"trainer: [", "is not YAML: "),
        (b"trainer: !include other.yaml", "is not YAML: "),
        (b"data: 1\nmodel: 2", "contains the sections data, model, but no trainer section; is it for Levanter?"),
        (b"- 1", "contains a list, but no trainer section; is it for Levanter?"),
        (b"", "contains nothing, but no trainer section; is it for Levanter?"),
    ],
)
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_levanter_file(str(path))
    assert str(raised.value).startswith(f"config file {path} {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("trainer: &a {seed: 3, x: *a}", "trainer.x"),
        ("trainer: {ids: &a [1, *a]}", "trainer.ids.1"),
        ("trainer: {}\nmodel: &m {type: llama, rope: {of: *m}}", "model.rope.of"),
    ],
)
def test_sections_that_contain_themselves(tmp_path, content, name, raises_message):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with raises_message(ConfigError):
        read_levanter_file(str(path))
    path.write_text("a: &a {model: 2}\ntrainer: {x: *a, y: *a}")  # an alias by itself is fine
    assert [*read_levanter_file(str(path)).sections] == ["a", "trainer"]


def test_is_levanter_config():
    assert is_levanter_config({"trainer": {}, "model": {"type": "llama"}})
    assert is_levanter_config({"trainer": None})
    assert not is_levanter_config({"model": {"ref": "x"}, "hardware": {"slice": "cpu-8"}})
    assert not is_levanter_config({"trainer": {}, "workload": {"batch": 8}})
    assert not is_levanter_config(["trainer"])
    assert not is_levanter_config(None)


def test_imports_no_jax():
    script = "import sys, shardplan.levanter_config.trainer_section; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "haliax", "levanter"} & set(modules)


@pytest.mark.parametrize("path", sorted(Path("configs/levanter").glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_of_the_repository(path):
    """They are for 128 devices, and map a logical axis to every mesh axis of several devices."""
    section = parse_trainer_section(read_levanter_file(str(path)).sections["trainer"], 128)
    assert section.mesh["replica"] * section.mesh["data"] * section.mesh["model"] == 128
    mapped = {
        axis
        for mapping in (section.compute_mapping, section.param_mapping)
        for axes in mapping.values()
        for axis in axes
    }
    assert {axis for axis, size in section.mesh.items() if size > 1} <= mapped
