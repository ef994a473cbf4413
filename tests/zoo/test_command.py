import csv
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from overspill.zoo.command import app
from overspill.zoo.registry import REGISTRY

TINY = ["--batch-size", "2", "--sequence-length", "32", "--sample", "8"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_train_leaves_checkpoint_curve_and_sample(tmp_path, text):
    out = tmp_path / "new" / "run"
    result = invoke("train", "--data", text, "--out", out, "--steps", 3, "-p", "offload_latents", "-p", "*.mlp.*=host",
                    *TINY)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint", "loss.csv", "loss.png", "sample.txt"]
    rows = list(csv.DictReader((out / "loss.csv").read_text().splitlines()))
    assert [int(r["step"]) for r in rows] == [1, 2, 3]
    assert all(2 < float(r["loss"]) < 7 and float(r["mtp_loss"]) > 2 for r in rows)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("def ")
    before, after = map(float, re.findall(r"validation loss after \d+ steps: (\d\.\d+) nats a byte", result.output))
    assert after < before
    # The placement table comes before the first step, the census after compiling.
    assert result.output.index("Activations") < result.output.index("compiled in")
    assert result.output.index("compiled in") < result.output.index("Kept for the backward pass")
    assert re.search(r"attention\.kv_latent +named .* host", result.output)
    assert re.search(r"attention\.query +named +recomputed", result.output)

    # A run goes on from its checkpoint, here with other placements.
    more = tmp_path / "more"
    result = invoke("train", "--data", text, "--out", more, "--resume", out, "--steps", 5, "-p", "save_all", *TINY)
    assert result.exit_code == 0, result.output
    assert [int(r["step"]) for r in csv.DictReader((more / "loss.csv").read_text().splitlines())] == [4, 5]
    for arguments, message in (
        (["--steps", 3], "has 3 steps done: ask for more"),
        (["--steps", 9, "--seed", 1], "a run with seed 0, not 1"),
        (["--steps", 9, "--model", "overspill-llama-tiny"], "a run with model 'overspill-deepseek-tiny'"),
    ):
        refused = invoke("train", "--data", text, "--out", tmp_path / "x", "--resume", out, *arguments, *TINY)
        assert refused.exit_code == 2 and message in refused.output, refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3.1-8bb"], "no model is called 'llama-3.1-8bb'; did you mean 'llama-3.1-8b'"),
        (["--data", "nowhere"], "data path 'nowhere' doesn't exist"),
        (["--data", "EMPTY"], "holds no text"),
        (["--data", "SHORT"], "is longer than the corpus"),
        (["--sequence-length", "9999"], "sequence length 9999 is longer than overspill-deepseek-tiny was made for"),
        (["-p", "*.mpl.*=host"], "'*.mpl.*' matches no activation; did you mean '*.mlp"),
        (["-p", "*.mlp.*=disk"], "placement 'disk' is not one of 'device', 'host', 'recompute'"),
        (["-p", "*.mlp.*"], "says no place: write it as '*.mlp.*=host'"),
        (["-p", "offload_everything"], "no preset is called 'offload_everything'"),
        (["-p", "*=recompute"], "block_input' can't be recomputed"),
        (["--model", "overspill-llama-tiny", "-p", "offload_latents"], "doesn't fit Llama"),
        (["--segments", "one"], "segments are layer indices"),
        (["--segments", "7"], "segments=(7,) must be increasing layer indices"),
        (["--dtype", "float8"], "dtype 'float8' is not one of float32, bfloat16"),
        (["--learning-rate", "-1"], "learning rate -1.0 must be more than 0"),
        (["--resume", "nowhere"], "there is no checkpoint at 'nowhere/checkpoint': no such folder"),
        (["--resume", "BROKEN"], "is damaged: metadata.json lacks position, extra, arrays, versions"),
        (["--resume", "LIST"], "has format []"),
        (["--out", "EXISTING"], "exists already"),
        (["--out", "SHORT/run"], "can't be made"),
        (["--prompt", "\udcff"], "is no valid text"),
        (["--model", "llama-3.1-405b"], "GiB to train, and this machine has"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "EXISTING").mkdir()
    (tmp_path / "SHORT").write_text("short\nvery short")
    for name, metadata in {"BROKEN": '{"format": 1}', "LIST": "[]"}.items():
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        (tmp_path / name / "checkpoint" / "metadata.json").write_text(metadata)
    before = sorted(tmp_path.rglob("*"))
    result = invoke("train", "--steps", 1, *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupt_saves_and_says_where(tmp_path, text):
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from overspill.zoo.command import main; main()", "train", "--data", str(text),
               "--out", str(out), "--steps", "100000", *TINY]  # fmt: skip
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("compiled in"):
                time.sleep(1)
                process.send_signal(signal.SIGINT)
                break
        lines += process.stdout.readlines()
    output = "".join(lines)
    assert process.returncode == 130, output
    assert re.search(r"interrupted after step \d+ of 100000; saved in", output), output
    # The command to go on with stands on a line of its own and works.
    (line,) = [line for line in output.splitlines() if line.startswith("overspill train --resume ")]
    arguments = shlex.split(line.replace("100000", str(int(re.search(r"after step (\d+)", output)[1]) + 1)))
    again = invoke(*arguments[1:], "--out", tmp_path / "again", "--sample", "0")
    assert again.exit_code == 0, again.output
    assert "Traceback" not in output
    assert (out / "checkpoint" / "metadata.json").exists() and (out / "loss.csv").exists()


def test_models_lists_every_entry_with_its_size():
    result = invoke("models")
    assert result.exit_code == 0
    for name in REGISTRY:
        assert re.search(rf"^ *{re.escape(name)} ", result.output, re.MULTILINE), name
    assert re.search(r"deepseek-v3 .* 671,026,419,200 +37,552,297,472 +11,610,068,224", result.output)
    assert invoke("models", "--names").output.split() == list(REGISTRY)


def test_help_and_version():
    assert "offload_all" in invoke("train", "--help").output
    assert re.fullmatch(r"overspill \d+\.\d+\.\d+\n", invoke("--version").output)


def test_the_command_is_installed():
    script = pathlib.Path(sys.executable).parent / "overspill"
    assert subprocess.run([script, "--version"], capture_output=True, check=True).stdout.startswith(b"overspill ")
