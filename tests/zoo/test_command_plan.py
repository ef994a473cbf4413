"""`overspill plan`: what it prints, writes and refuses. The compiler is asked in one test only."""

import json
import types

import jax
import pytest
from typer.testing import CliRunner

from overspill.policies import calibrating
from overspill.policies.plan_reasons import format_seconds
from overspill.zoo import planning
from overspill.zoo.command import app

LLAMA, DEEPSEEK = "overspill-llama-tiny", "overspill-deepseek-tiny"
SMALL = ["--sequence", "128", "--global-batch", "16", "--segments", "1", "--no-calibrate"]


@pytest.fixture(autouse=True, scope="module")
def same_platforms():
    """The command keeps JAX to the CPU: in its own process, and here no longer than these tests."""
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = run(DEEPSEEK, "--hardware", "gb200", "--devices", "8", *SMALL, "--json", str(path))
    assert result.exit_code == 0, result.output
    return result.output, json.loads(path.read_text())


def test_it_prints_what_was_planned_and_why(planned):
    output, _ = planned
    for text in ("8 x NVIDIA GB200 as expert=8 (chosen; --mesh takes another)", "16 x 128 tokens", "MFU", "tokens/s",
                 "device memory", "binding", "why", "all recomputed", "attention.query_latent"):  # fmt: skip
        assert text in output


def test_it_writes_what_it_prints(planned):
    output, written = planned
    plan, asked = written["plan"], written["asked"]
    assert asked["mesh"] == {"expert": 8} and asked["global_batch"] == 16 and asked["sequence"] == 128
    assert format_seconds(plan["seconds"]) in output
    assert set(plan["placements"].values()) <= {"device", "host", "recompute"}


def test_what_does_not_fit_says_by_how_much_and_what_would(tmp_path):
    result = run(LLAMA, "--hardware", "h200", "--devices", "1", *SMALL, "--device-gib", "0.03", "--accumulate", "1")
    assert result.exit_code == 1
    assert "more than the limit of" in result.output
    assert "fits with a global batch of" in result.output or "no smaller batch fits" in result.output


def test_a_step_that_does_not_fit_is_cut(tmp_path):
    path = tmp_path / "plan.json"
    arguments = [LLAMA, "--hardware", "h200", "--mesh", "fsdp=2", *SMALL, "--global-batch", "32"]
    whole = run(*arguments, "--accumulate", "1", "--frontier", "--json", str(path))
    assert whole.exit_code == 0, whole.output
    least = min(size for size, _ in json.loads(path.read_text())["plan"]["frontier"])
    result = run(*arguments, "--device-gib", f"{0.75 * least / 2**30:.5f}", "--json", str(path))
    assert result.exit_code == 0, result.output
    asked = json.loads(path.read_text())["asked"]
    assert asked["accumulate"] > 1 and asked["expert_rounds"] == 1
    assert "to make it fit:" in result.output and "takes another number" in result.output


def test_memory_that_is_short_is_made_up_for(planned):
    result = run(LLAMA, "--hardware", "rtx-4090", "--devices", "2", *SMALL, "--largest-batch", "--frontier")
    assert result.exit_code == 0, result.output
    assert "largest global batch that fits" in result.output and "With less or more device memory" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "h20"], "h200"),
        (["--hardware", "h200", "--mesh", "fsdp=3"], "3"),
        (["--hardware", "h200", "--products", "int4"], "no peak for int4"),
        (["--hardware", "rtx-4090", "--verify"], "there is no target"),
        (["--hardware", "h200", "--plot", "plan.txt"], ".png"),
        (["--hardware", "h200", "--measured", "nowhere.json"], "can't be read"),
        (["--hardware", "h200", "--json", "no/such/folder/x.json"], "there is no folder"),
        (["--hardware", "h200", "--dtype", "int8"], "int8"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, words):
    result = run(LLAMA, *SMALL, *arguments)
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ") and "Traceback" not in result.output


def test_measurements_take_the_place_of_the_table(tmp_path):
    measured = tmp_path / "report.json"
    links = {f"{way}_bytes_per_second": 1e9 for way in ("device_to_host", "host_to_device")}
    measured.write_text(json.dumps({"device_kind": "NVIDIA H200", "jax": "0.10.2", "links": links}))
    options = planning.Options(LLAMA, "h200", devices=1, global_batch=4, sequence=128, measured=measured)
    hardware = planning.prepare(options).hardware
    assert hardware.rates() == (1e9, 1e9)


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    result = run(LLAMA, "--hardware", "h200", "--devices", "1", *SMALL, "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_verifying_compiles_the_planned_step(gpu, tmp_path):
    path = tmp_path / "plan.json"
    # A fast link, and layers enough: moving takes memory of its own.
    options = planning.Options("llama-3.1-8b", "gb200", mesh="fsdp=2", global_batch=2, sequence=4096)
    arguments = ["llama-3.1-8b", "--hardware", "gb200", "--mesh", "fsdp=2", "--global-batch", "2", "--sequence", "4096"]
    recomputed, kept, _ = (one.footprint.device_bytes for one in planning.prepare(options).planner().references)
    limit = (recomputed + 0.2 * (kept - recomputed)) / 2**30
    result = run(*arguments, "--device-gib", f"{limit:.5f}", "--verify", "--json", str(path))
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    compiled, plan = written["compiled"], written["plan"]
    moved = sum(b["bytes"] * b.get("count", 1) for b in compiled["evidence"]["host_buffers"])
    assert plan["host_bytes"] > 0
    assert moved == plan["host_bytes"]
    # XLA of JAX 0.12 takes 7 % less than that of 0.10, whose memory is what is simulated.
    assert 0.95 < plan["simulated_bytes"] / compiled["device_bytes"] < (1.05 if jax.__version__ < "0.11" else 1.1)
    assert plan["calibrated"] and plan["device_bytes"] == compiled["device_bytes"] <= limit * 2**30
    assert "Predicted and compiled" in result.output and "simulated without the compiler" in result.output
    assert "the compiler says so" in result.output


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that is there, and what it does: says a size, or fails."""
    said = types.SimpleNamespace(more=0, error=None)

    def compiled(planner, plan, target):
        if said.error is not None:
            raise said.error
        return types.SimpleNamespace(error=None, device_bytes=plan.simulated_bytes + said.more)

    for module in (planning, calibrating):
        monkeypatch.setattr(module, "require_compiler", lambda platform: "one")
    monkeypatch.setattr(planning.Planner, "compiled", compiled)
    return said


QUICK = [LLAMA, "--hardware", "h200", "--devices", "1", *SMALL[:-1]]


def test_a_compiler_that_is_there_is_asked(compiler, tmp_path):
    path, plans = tmp_path / "plan.json", []
    for arguments in ([], ["--no-calibrate"]):
        compiler.more = 2**20
        result = run(*QUICK, *arguments, "--json", str(path))
        assert result.exit_code == 0, result.output
        plans.append(json.loads(path.read_text())["plan"])
    asked, simulated = plans
    assert asked["calibrated"] and asked["device_bytes"] == asked["simulated_bytes"] + 2**20
    assert not simulated["calibrated"] and simulated["device_bytes"] == simulated["simulated_bytes"]


def test_a_compiler_that_fails_is_no_reason_to_have_no_plan(compiler):
    compiler.error = planning.CompileError("it stumbled over itself")
    result = run(*QUICK)
    assert result.exit_code == 0
    assert "device memory is simulated, because it stumbled over itself" in " ".join(result.output.split())
    result = run(*QUICK, "--calibrate")
    assert result.exit_code == 2 and "it stumbled over itself" in result.output


def test_without_a_compiler_memory_is_simulated(monkeypatch):
    def missing(platform):
        raise ModuleNotFoundError("pip install 'overspill[gpu-compile]'")

    monkeypatch.setattr(calibrating, "require_compiler", missing)
    assert "; simulated" in run(*QUICK).output


def test_verifying_needs_a_compiler(monkeypatch):
    def missing(platform):
        raise ModuleNotFoundError("pip install 'overspill[gpu-compile]'")

    monkeypatch.setattr(planning, "require_compiler", missing)
    result = run(LLAMA, "--hardware", "h200", *SMALL, "--verify")
    assert result.exit_code == 2 and "gpu-compile" in result.output
