"""`overspill selftest`: its parts, its report and its exit code."""

import io
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from typer.testing import CliRunner

from overspill.zoo import selftest, selftest_links
from overspill.zoo.command import app
from overspill.zoo.selftest import Options, SelfTest, prepare
from overspill.zoo.selftest_gradients import Case, Result
from overspill.zoo.selftest_links import Rates, largest_rates, measure_links, measure_matmul
from overspill.zoo.selftest_stack import Variant


@pytest.fixture
def light(monkeypatch):
    """Copies and matmuls that take no time."""
    monkeypatch.setattr(selftest, "MIB", 2**10)
    monkeypatch.setattr(selftest, "measure_matmul", lambda *args, **options: 1e12)


class NoGradients:
    """Stands for the test of gradients, with what it would have found."""

    def __init__(self, wanted, *, device):
        good = Result(Case("llama", "offload_qkv"), error=1e-6, share=0.02)
        bad = Result(
            Case("llama", "offload_all"), error=float("inf"), share=float("inf"), failures=["offload_all: bad"]
        )
        self.references, self.results = {"llama": Result(Case("llama", None))}, [good, bad]
        self.failures = ["offload_all: bad"]

    def __call__(self, progress):
        progress("a [bracket")


class NoStack:
    """Stands for the test of the stack."""

    def __init__(self, shape, variants, *, device, runs):
        self.shape, self.runs, self.failures = shape, runs, []
        self.variants = {"save_all": Variant("save_all"), "offload_all": Variant("offload_all", 10, 2**20)}
        self.variants["save_all"].seconds = [0.1]

    def __call__(self, progress):
        pass

    def freed(self, name):
        return 2**20, -5

    def ratio(self, name):
        return 1.0 if name == "save_all" else None

    def as_json(self):
        return {"variants": [variant.as_json() for variant in self.variants.values()]}


def run(options):
    out = io.StringIO()
    test = prepare(options)
    return test(Console(file=out, width=200, force_terminal=False)), out.getvalue(), test


def test_links_alone_pass_on_a_cpu_and_are_in_the_report_in_bytes_per_second(light, tmp_path):
    path = tmp_path / "report.json"
    code, text, _ = run(Options(only=("links",), json=path, quick=True))
    report = json.loads(path.read_text())
    assert code == 0 and report["verdict"] == "passed" and report["failures"] == []
    links = report["links"]
    for way in ("device_to_host", "host_to_device"):
        for key in (f"{way}_bytes_per_second", f"both_{way}_bytes_per_second"):
            assert links[key] == max(row[key] for row in links["sizes"]) > 0
    assert [row["size_bytes"] for row in links["sizes"]] == [1024, 16 * 1024]
    assert report["matmul"] == {"dtype": "float32", "size": 512, "flops_per_second": 1e12}
    assert report["jax"] == jax.__version__ and report["platform"] == "cpu" and report["parts"] == ["links"]
    assert "gradients" not in report and "stack" not in report
    assert "this is a CPU" in text and "self-test passed on cpu" in text and "GB/s" in text


def test_flags_in_the_environment_are_reported(light, monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "96")
    monkeypatch.setenv("SECRET", "no")
    _, text, test = run(Options(only=("links",)))
    environment = test.as_json()["environment"]
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "96" and "SECRET" not in environment
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=96" in text


def test_what_a_gpu_lacks_for_overlap_is_said(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true")
    missing = SelfTest(Options(), Device()).missing_flags()
    assert "xla_gpu_enable_pipelined_host_offloading" in missing
    assert "xla_gpu_enable_latency_hiding_scheduler" not in missing
    Device.device_kind = "an unknown one"
    assert SelfTest(Options(), Device()).missing_flags() == []


def test_findings_are_printed_and_written_and_the_exit_code_is_1(light, monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "GradientTest", NoGradients)
    monkeypatch.setattr(selftest, "StackTest", NoStack)
    path = tmp_path / "report.json"
    code, text, _ = run(Options(json=path, families=("llama",)))
    assert code == 1
    assert "FAILED: offload_all: bad" in text and "self-test failed: 1 findings" in text
    row = next(line for line in text.splitlines() if "offload_all" in line and "WRONG" in line)
    assert "inf WRONG" in row
    report = json.loads(path.read_text())
    assert report["verdict"] == "failed" and report["failures"] == ["offload_all: bad"]
    assert report["gradients"]["against_no_policy"][1]["largest_relative_error"] == "inf"
    assert "says nothing of its memory" in text and "-5 B" in text


def test_the_verdict_says_what_offload_was_seen_in(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    test = SelfTest(Options(only=("memory",)), Device())
    test.stack = NoStack(None, {}, device=None, runs=0)
    assert test.verdict == "self-test passed on NVIDIA H200: offload is in every compiled program"
    test.stack.variants["offload_all"].peak_after = 7
    assert test.verdict.endswith("in every compiled program and in the device's memory")
    assert "nothing can be said of the device's memory" not in " ".join(test._head())


def test_links_that_cannot_be_measured_are_a_finding(light, monkeypatch):
    def refuse(*args, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: no copies today\nmore")

    monkeypatch.setattr(selftest, "measure_links", refuse)
    code, text, test = run(Options(only=("links",)))
    assert code == 1 and test.failures == ["links can't be measured: JaxRuntimeError: INTERNAL: no copies today"]
    assert "TFLOP/s" in text  # the rest went on


def test_wrong_requests_are_told_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="no part of the self-test is called 'speed': there are memory, times"):
        prepare(Options(only=("speed",)))
    with pytest.raises(ValueError, match="no family of the self-test is called 'gpt': there are llama, deepseek"):
        prepare(Options(families=("gpt",)))
    with pytest.raises(ValueError, match="there is no folder"):
        prepare(Options(json=tmp_path / "none" / "report.json"))
    with pytest.raises(ValueError, match="it is a folder"):
        prepare(Options(json=tmp_path))
    found = CliRunner().invoke(app, ["selftest", "--only", "speed"])
    assert found.exit_code == 2 and "'speed'" in found.output


def test_the_command_runs_and_gives_the_exit_code(light, monkeypatch, tmp_path):
    path = tmp_path / "report.json"
    arguments = f"selftest --quick --only links --only gradients --family llama --json {path}".split()
    monkeypatch.setattr(selftest, "GradientTest", NoGradients)
    assert CliRunner().invoke(app, arguments).exit_code == 1
    assert json.loads(path.read_text())["parts"] == ["gradients", "links"]


def test_copies_that_stay_where_they_are_are_refused(monkeypatch):
    device = jax.devices()[0]
    monkeypatch.setattr(selftest_links, "memory_kinds", lambda device: frozenset({"device"}))
    with pytest.raises(ValueError, match="offers no pinned_host memory, only"):
        measure_links(device, [1024], 1)
    monkeypatch.undo()
    real = jax.device_put
    monkeypatch.setattr(selftest_links.jax, "device_put", lambda x, sharding: real(x, device))
    with pytest.raises(ValueError, match="a copy to pinned_host memory is in device memory"):
        measure_links(device, [1024], 1)


def test_rates_are_bytes_over_the_least_seconds(monkeypatch):
    (rates,) = measure_links(jax.devices()[0], [4096], 2)
    assert rates.size == 4096 and min(rates.as_json().values()) > 0
    slow, fast = Rates(1, 1.0, 4.0, 3.0, 1.0), Rates(2, 2.0, 3.0, 1.0, 2.0)
    assert list(largest_rates([slow, fast]).values()) == [2.0, 4.0, 3.0, 2.0]
    monkeypatch.setattr(selftest_links, "best_seconds", lambda function, repeats: 0.5)
    assert measure_matmul(jax.devices()[0], jnp.dtype("bfloat16"), 8, 1) == 2 * 8**3 * 4 / 0.5
