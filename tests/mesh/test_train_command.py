"""`overspill train` over meshes: the same losses as on one device, also where a run goes on over another mesh."""

import csv

import pytest
from typer.testing import CliRunner

from overspill.zoo.command import app

TINY = ["--model", "overspill-llama-tiny", "--batch-size", "8", "--sequence-length", "32", "--sample", "4"]


def train(text, out, *arguments):
    result = CliRunner().invoke(
        app, ["train", "--data", str(text), "--out", str(out), *TINY, *arguments], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((out / "loss.csv").read_text().splitlines()))
    return result.output, [float(row["loss"]) for row in rows], (out / "sample.txt").read_text()


def test_meshes_and_one_device_train_alike(tmp_path, text):
    one = train(text, tmp_path / "one", "--steps", "2")[1]
    one += train(text, tmp_path / "more", "--steps", "4", "--resume", str(tmp_path / "one"))[1]
    output, losses, _ = train(
        text, tmp_path / "a", "--steps", "2", "--mesh", "data=2,tensor=2", "--cpu-devices", "8", "--rule", "vocab=",
        "--state-memory", "optimizer.*=host", "--accumulate", "2",
    )  # fmt: skip
    assert "mesh data=2,tensor=2: " in output and "one device" in output
    _, more, sample = train(
        text, tmp_path / "b", "--steps", "4", "--resume", str(tmp_path / "a"), "--mesh", "fsdp=4,sequence=2"
    )
    assert losses + more == pytest.approx(one, rel=1e-5)
    assert len(more) == 2 and sample


def test_a_run_in_rounds(tmp_path, text):
    output, losses, _ = train(
        text, tmp_path / "run", "--model", "overspill-deepseek-tiny", "--mesh", "expert=2", "--cpu-devices", "8",
        "--steps", "1", "--expert-rounds", "3",
    )  # fmt: skip
    assert "moe.dispatched" not in output and "moe.router.logits" in output
    assert losses == pytest.approx([5.6], abs=0.2)  # of weights that know nothing, over the ids of bytes
