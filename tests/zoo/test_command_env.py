import json
import subprocess

import pytest
from typer.testing import CliRunner

from overspill.policies import flags as rooms
from overspill.policies.flags import POOL, XLA, Flag, xla_flags
from overspill.zoo.command import app

SLOP = "xla_gpu_memory_limit_slop_factor"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(rooms, "_machine_bytes", lambda: None)
    for name in (XLA, POOL):
        monkeypatch.delenv(name, raising=False)


def run(*arguments):
    return CliRunner().invoke(app, ["env", *arguments])


def test_what_it_prints_can_be_evaluated():
    done = run("--target", "gb200")
    assert done.exit_code == 0 and not done.stderr
    assert done.stdout == xla_flags("gb200").exports({})
    shell = subprocess.run(
        ["sh", "-euc", f'eval "$1"; printf %s "$XLA_FLAGS ${POOL}"', "sh", done.stdout],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    wanted = xla_flags("gb200").environment({})
    assert shell.stdout == f"{wanted[XLA]} {wanted[POOL]}" and not shell.stderr


def test_fish_and_host_memory():
    done = run("--target", "h200", "--shell", "fish", "--host-memory-gib", "200")
    assert done.exit_code == 0 and f"set -gx {POOL} '200';" in done.stdout.splitlines()


def test_json():
    done = run("--target", "tpu-v5p:4x4x4", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found == xla_flags("tpu-v5p:4x4x4").as_json() and list(found["environment"]) == ["LIBTPU_INIT_ARGS"]


def test_what_was_kept_and_left_out_is_said(monkeypatch):
    monkeypatch.setenv(XLA, f"--{SLOP}=150")
    monkeypatch.setattr(rooms, "_CUDA", (*rooms._CUDA, Flag("xla_two", "7", XLA, "made up", ">=99")))
    done = run("--target", "h200")
    assert done.exit_code == 0
    left, kept = done.stderr.splitlines()
    assert left.startswith("left out xla_two=7: jaxlib") and kept.startswith(f"kept {SLOP}=150: yours, not 95")
    assert f"--{SLOP}=150" in done.stdout.splitlines()[0] and "xla_two" not in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gb20"], "there is no target 'gb20'; did you mean gb200"),
        (["--target", "tpu-v5p:8x8"], "has 3 numbers"),
        (["--target", "h200", "--shell", "csh"], "shell 'csh' is not one of sh, fish"),
        (["--target", "tpu-v4", "--host-memory-gib", "9"], "only CUDA has a limit"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_to_evaluate(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_a_broken_environment_is_an_error_too(monkeypatch, tmp_path):
    monkeypatch.setenv(XLA, str(tmp_path / "none"))
    done = run("--target", "h200")
    assert done.exit_code == 2 and done.stdout == "" and "names a file of flags that can't be read" in done.stderr
