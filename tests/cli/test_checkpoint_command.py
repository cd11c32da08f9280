"""`python -m shardplan.checkpoint` prints read schedules."""

import json

import pytest

from shardplan.__main__ import main


def test_schedule_of_405b_on_v4_256(tmp_path, capsys):
    """32 processes read every byte once, in equal parts and long ranges, in a second at the speed of their network."""
    argv = ["--config", "configs/405b.yaml", "--schedule", "--json", str(tmp_path / "schedule.json")]
    assert main("checkpoint", argv) == 0
    forecast = json.loads((tmp_path / "schedule.json").read_text())
    sizes = [ranges["bytes"] for ranges in forecast["processes"].values()]
    assert len(sizes) == 32 and max(sizes) <= 1.01 * min(sizes)
    assert forecast["checkpoint_bytes"] == 2 * 405_853_388_800
    assert 1 <= forecast["times_read"] < 1.0001
    assert forecast["seconds"] == pytest.approx(forecast["checkpoint_bytes"] / 32 / 25e9, rel=0.01)
    assert all(ranges["bytes"] / ranges["count"] > 10e6 for ranges in forecast["processes"].values())
    text = capsys.readouterr().out
    assert "all-to-all over data" in text and "1.000 x the 755.96 GiB of the checkpoint" in text


def test_schedule_of_a_checkpoint_at_hand(golden, tmp_path, capsys):
    """The offsets and types are those of the checkpoint; one process of eight devices reads all of it locally."""
    argv = [
        "--model",
        str(golden / "mixtral"),
        "--hardware.slice",
        "cpu-8",
        "--schedule",
        "--json=-",
        "--workload.position=64",
    ]
    assert main("checkpoint", argv) == 0
    out, err = capsys.readouterr()
    forecast = json.loads(out)
    assert forecast["source"] == str(golden / "mixtral") and list(forecast["processes"]) == ["0"]
    assert forecast["times_read"] == 1 and {array["sharing"] for array in forecast["arrays"]} == {"local"}
    assert "1 processes read" in err


@pytest.mark.quick
def test_nothing_to_do(capsys):
    assert main("checkpoint", ["--config", "configs/405b.yaml"]) == 2
    assert "nothing to do; --schedule prints which process reads what" in capsys.readouterr().err
