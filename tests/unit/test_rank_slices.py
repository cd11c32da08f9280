"""The slices of a generation by tokens per second per chip."""

import json

import pytest
from conftest import fails, run

pytestmark = pytest.mark.with_levanter_12

ARGUMENTS = ["--model.config=llama-3.1-8b", "--workload.batch=16"]


def test_slices_of_a_generation(tmp_path):
    """15 GiB of weights, on chips of 15.75 GiB."""
    path = tmp_path / "ranking.json"
    done = run("plan", *ARGUMENTS, "--rank_slices", "v5e", "--json", path)
    assert done.returncode == 0, done.stderr
    values = json.loads(path.read_text())
    slices = values["slices"]
    assert {each["chips"] for each in slices} == {4, 8, 16, 32, 64, 128, 256}
    assert all(each["peak"] < each["available"] for each in slices)
    speeds = [16 * 2048 / each["step_seconds"] / each["chips"] for each in slices]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds == pytest.approx([each["tokens_per_second_per_chip"] for each in slices])
    assert [each["slice"] for each in slices if each["is_smallest"]] == ["v5e-4"]
    assert list(values["without_plan"]) == ["v5e-1"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{slices[0]['slice']} has the most tokens/s per chip: {speeds[0]:,.0f}; smallest that ")
    assert sum("v5e-4 (smallest)" in line for line in lines) == 1
    text = " ".join(done.stdout.split())
    assert "smallest that fits: v5e-4 " in text
    assert "· slice v5e-1: no plan fits v5e-1: the nearest miss" in text


def test_nothing_fits():
    done = run("plan", *ARGUMENTS, "--rank_slices", "v5e", "--mesh.data=1", "--mesh.model=1", "--mesh.replica=1")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.endswith("no plan fits any slice of v5e; several slices have more memory, as in 2xv6e-256\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank_slices", "v4", "v5"], "rank_slices: unknown generation 'v5'; valid: all, tpu7x, v3, v4, v5e, "),
        (["--rank_slices", "v4", "--what_if"], "rank_slices plans for many slices; leave out --what_if"),
    ],
)
def test_unusable_arguments(arguments, message):
    fails(run("plan", *ARGUMENTS, *arguments), 2, message)
