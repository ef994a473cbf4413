"""Compiling for hardware that isn't there: what is asked, what is kept, what is said when it can't be done."""

import importlib.metadata
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from overspill import policies
from overspill.policies import Activation, ahead, ahead_compiler
from overspill.policies.evidence import Evidence

NOTHING = Evidence((), (), (0, 0), (), 0, (), 0, 0).as_json()


class Wave(eqx.Module):
    """A layer with one activation on the host, in a scan of four."""

    weight: jax.Array
    score: Activation

    def __init__(self):
        self.weight = jnp.zeros((4, 128, 128))
        self.score = Activation("score", "host")

    def __call__(self, x):
        self = policies.named(self)

        def layer(x, weight):
            body = lambda module, x: x + jnp.sin(module.score(x @ module.weight))
            return policies.checkpoint(_Bound(eqx.tree_at(lambda m: m.weight, self, weight), body))(x), None

        return jax.lax.scan(layer, x, self.weight)[0]


class _Bound(eqx.Module):
    module: Wave
    body: object = eqx.field(static=True)

    def __call__(self, x):
        return self.body(self.module, x)


X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def answer(**changes):
    sizes = dict.fromkeys(("argument", "output", "alias", "temp", "code"), 3)
    return {"device": sizes, "host": sizes, "error": None, "flops": None, "evidence": NOTHING, "compile_seconds": 1.0,
            "compiler_memory": 5} | changes  # fmt: skip


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that counts what it is asked, and a cache of its own."""
    asked = []

    def compile(program, request, variables, place, text):
        asked.append((program, request, variables))
        return answer()

    monkeypatch.setattr(ahead, "_compile", compile)
    monkeypatch.setattr(ahead, "require_compiler", lambda platform: f"{platform} 1")
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    return asked


def test_a_program_is_compiled_once_for_a_target(compiler):
    first = policies.compile_ahead(Wave(), X, target="h200", flags={})
    again = policies.compile_ahead(Wave(), X, target="h200", flags={})
    assert len(compiler) == 1 and (first.cached, again.cached) == (False, True)
    assert again.device == first.device and again.device_bytes == 9 and again.devices == 1
    others = [
        lambda: policies.compile_ahead(Wave(), X, target="gb200", flags={}),
        lambda: policies.compile_ahead(Wave(), X, target="h200", flags={"XLA_FLAGS": "--xla_gpu_x=1"}),
        lambda: policies.compile_ahead(Wave(), jax.ShapeDtypeStruct((16, 128), jnp.float32), target="h200", flags={}),
        lambda: policies.compile_ahead(policies.place(Wave(), "save_all"), X, target="h200", flags={}),
        lambda: policies.compile_ahead(Wave(), X, target="h200", flags={}, cache=False),
    ]
    for count, other in enumerate(others, start=2):
        other()
        assert len(compiler) == count


def test_the_line_that_a_program_comes_from_makes_no_difference(compiler):
    policies.compile_ahead(lambda w, x: jnp.sin(x @ w), jnp.zeros((128, 128)), X, target="h200", flags={})
    policies.compile_ahead(lambda w, x: jnp.sin(x @ w), jnp.zeros((128, 128)), X, target="h200", flags={})
    assert len(compiler) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"evidence": {}}', b"\xff\xfe", b'{"evidence": 3}'])
def test_a_damaged_cache_is_made_anew(compiler, tmp_path, damage):
    policies.compile_ahead(Wave(), X, target="h200", flags={})
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(damage)
    assert not policies.compile_ahead(Wave(), X, target="h200", flags={}).cached
    assert policies.compile_ahead(Wave(), X, target="h200", flags={}).cached
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [file]


def test_a_cache_that_cannot_be_written_is_done_without(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "file"))
    assert not policies.compile_ahead(Wave(), X, target="h200", flags={}).cached
    assert not policies.compile_ahead(Wave(), X, target="h200", flags={}).cached


def test_what_the_compiler_is_told(compiler, monkeypatch):
    mesh = AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    cut = jax.ShapeDtypeStruct((32, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    made = policies.compile_ahead(Wave(), cut, target="gb200", flags={"A": "1"})
    program, request, variables = compiler[-1]
    assert made.devices == request["devices"] == 16 and request["topology"]["topology"] == "1x4x4"
    assert variables == {"A": "1", "XLA_FLAGS": "--xla_gpu_autotune_level=0"} and isinstance(program, bytes)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_mine=2")
    policies.compile_ahead(Wave(), cut, target="gb200")
    flags = compiler[-1][2]["XLA_FLAGS"].split()
    assert "--xla_gpu_mine=2" in flags and "--xla_gpu_enable_latency_hiding_scheduler=true" in flags


def test_how_much_memory_a_program_can_have(compiler):
    whole = policies.compile_ahead(Wave(), X, target="h200", flags={"XLA_PYTHON_CLIENT_MEM_FRACTION": "1"})
    half = policies.compile_ahead(Wave(), X, target="h200", flags={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"})
    assert whole.capacity == 151397597184 and half.capacity == whole.capacity // 2
    usual = policies.compile_ahead(Wave(), X, target="h200", flags={})
    assert usual.capacity == whole.capacity * 3 // 4 and usual.fits
    assert policies.compile_ahead(Wave(), X, target="tpu-v5e", flags={}).capacity <= 16 * 2**30


def test_a_target_that_there_is_not(compiler):
    with pytest.raises(ValueError, match="no target 'h20'.*h200"):
        policies.compile_ahead(Wave(), X, target="h20")
    mesh = AbstractMesh((3,), ("data",), axis_types=(AxisType.Auto,))
    cut = jax.ShapeDtypeStruct((6, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match="3"):
        policies.compile_ahead(Wave(), cut, target="tpu-v5p", flags={})
    assert not compiler


def test_a_compiler_that_is_missing_or_of_another_version(monkeypatch):
    versions = {"jaxlib": "0.10.2"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(ahead.importlib.metadata, "version", version)
    with pytest.raises(ModuleNotFoundError, match=r"overspill\[gpu-compile\]"):
        policies.compile_ahead(Wave(), X, target="h200")
    with pytest.raises(ModuleNotFoundError, match=r"overspill\[tpu-compile\]"):
        policies.compile_ahead(Wave(), X, target="tpu-v5p")
    versions["jax-cuda13-plugin"] = "0.12.0"
    with pytest.raises(ModuleNotFoundError, match="pip install jax-cuda13-plugin==0.10.2"):
        policies.compile_ahead(Wave(), X, target="h200")
    versions["jax-cuda13-plugin"] = "0.10.2"
    monkeypatch.setattr(ahead, "_path", lambda: "")
    with pytest.raises(ModuleNotFoundError, match=r"ptxas.*overspill\[gpu-compile\]"):
        policies.compile_ahead(Wave(), X, target="h200")


FATAL = "F1130 05:10:11.123456  1234 remat.cc:1803] Check failed: !list.empty() Have nothing\n*** trace ***\n"


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (-6, FATAL, "signal 6.*Check failed: !list.empty"),
        (-9, "", "signal 9.*too little memory"),
        (1, "Traceback\n  File x\nValueError: no such thing\n", "ValueError: no such thing"),
        (1, "", "said nothing"),
        (0, "all went well", "all went well"),  # and no answer written
    ],
)
def test_a_compiler_that_fails(monkeypatch, code, said, reason):
    monkeypatch.setattr(ahead, "require_compiler", lambda platform: platform)

    class Failing:
        stdin = io.BytesIO()

        def __init__(self, *_, stderr, **__):
            stderr.write(said.encode())

        def wait(self):
            return code

        def kill(self):
            pass

    monkeypatch.setattr(ahead.subprocess, "Popen", Failing)
    with pytest.raises(policies.CompileError, match=reason):
        policies.compile_ahead(Wave(), X, target="h200", flags={}, cache=False)


def test_a_tpus_heap_is_counted_once():
    said = (
        "Total hbm usage >= 5.69G:\n    reserved        263.00M \n    program           4.02G \n"
        "\nI1130 12:26:46.112926    2741 backend.cc] Program sflag requirement 356B:\n    scoped           92B\n"
        "    HLO temp            60B (100.0% utilization)\nProgram hbm requirement 4.02G:\n    global        576.5K\n"
        "    scoped         2.06M\n    HLO temp       3.99G (100.0% utilization: Unpadded (3.75G) Padded (3.75G), "
        "6.2% fragmentation (254.01M))\n    overlays         26.08M\nProgram vmem requirement 59.44M:\n"
        "    scoped           15.44M\n"
    )
    assert ahead_compiler.scratch(said) == int(3.99 * 2**30) + int(2.06 * 2**20)
    assert ahead_compiler.scratch("Program hbm requirement 20B:\n    overlays             20B\n") == 0
    assert ahead_compiler.scratch("it said something else") is None


def test_a_tpu_that_refuses():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 30.25G of "
        "15.75G hbm. Exceeded hbm capacity by 14.50G.\n\nTotal hbm usage >= 30.75G:\n"
    )
    said = ahead_compiler._refused(message)
    assert said["device"]["temp"] == int(30.25 * 2**30) and said["error"].startswith("RESOURCE_EXHAUSTED")
    other = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total (400.50G) exceeds available HBM (15.75G)."
    assert ahead_compiler._refused(other)["device"]["temp"] == int(400.5 * 2**30)
    host = "RESOURCE_EXHAUSTED: Ran out of memory in memory space host. Used 250.03G of 128.00G host. " + "x" * 9999
    said = ahead_compiler._refused(host)
    assert said["host"]["temp"] == int(250.03 * 2**30) and said["device"]["temp"] == 0 and len(said["error"]) < 500
    assert ahead_compiler._refused("INTERNAL: something else") is None
    assert ahead_compiler._refused("RESOURCE_EXHAUSTED: too many threads") is None


def test_a_call_that_cannot_be_differentiated(compiler):
    with pytest.raises(TypeError, match="floating-point"):
        policies.compile_ahead(lambda x: x + 1, jnp.arange(3), target="h200", flags={})


@pytest.mark.parametrize("share", ["x", "0", "7", "nan", "-1"])
def test_a_share_of_memory_that_is_none(compiler, share):
    with pytest.raises(ValueError, match="XLA_PYTHON_CLIENT_MEM_FRACTION"):
        policies.compile_ahead(Wave(), X, target="h200", flags={"XLA_PYTHON_CLIENT_MEM_FRACTION": share})


@pytest.mark.parametrize("name", ["cache", "text", "flags", "target"])
def test_an_option_that_the_function_has_too(compiler, name):
    scope = {}
    exec(f"def loss(module, x, {name}=1): return module(x).sum()", scope)
    options = {"target": "h200"} | {name: {"target": "h200", "cache": False, "flags": {}, "text": "t"}[name]}
    for look in (policies.compile_ahead, policies.prove):
        with pytest.raises(TypeError, match=f"{name}= is an option of compiling"):
            look(scope["loss"], Wave(), X, **options)
    policies.compile_ahead(lambda module, x: scope["loss"](module, x), Wave(), X, target="h200")


@pytest.mark.parametrize("wrong", [{"device": {"temp": "lots"}}, {"compile_seconds": None}, {"error": 3}])
def test_a_cache_with_other_types(compiler, tmp_path, wrong):
    policies.compile_ahead(Wave(), X, target="h200", flags={})
    (file,) = (tmp_path / "cache").rglob("*.json")
    kept = json.loads(file.read_text())
    for name, value in wrong.items():
        kept[name] = kept[name] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(kept))
    assert not policies.compile_ahead(Wave(), X, target="h200", flags={}).cached


def test_a_cache_file_that_cannot_take_its_place_leaves_nothing(compiler, tmp_path):
    policies.compile_ahead(Wave(), X, target="h200", flags={})
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.unlink()
    (file / "full").mkdir(parents=True)
    assert not policies.compile_ahead(Wave(), X, target="h200", flags={}).cached
    assert not list((tmp_path / "cache").rglob("*.part"))


# With the compilers of the targets.

KEPT = 4 * 8 * 128 * 4  # bytes of four layers


def test_a_gpu_keeps_on_the_host_what_is_annotated(gpu, tmp_path):
    proof = policies.prove(Wave(), X, target=gpu, text=tmp_path / "program.txt")
    assert proof.planned_bytes == proof.host_bytes == proof.compiled.host["temp"] == KEPT
    assert proof.compiled.evidence.bytes_out == proof.compiled.evidence.bytes_in == KEPT
    assert proof.compiled.fits and 0 < proof.compiled.compiler_memory < 8 * 2**30
    text = (tmp_path / "program.txt").read_text()
    assert text.startswith("HloModule") and "S(5)" in text
    again = policies.compile_ahead(Wave(), X, target=gpu)
    assert again.cached and again.evidence == proof.compiled.evidence
    assert json.loads(json.dumps(proof.as_json()))["compiled"]["host"]["temp"] == KEPT
    saved = policies.compile_ahead(policies.place(Wave(), "save_all"), X, target=gpu)
    assert saved.host["temp"] == 0 and saved.device["temp"] > proof.compiled.device["temp"]


def test_what_the_compiler_says_is_told(gpu, monkeypatch):
    """Overspill's own folder has no say in what Python imports there, and neither has the user's."""
    monkeypatch.setattr(ahead.mlir, "module_to_bytecode", lambda module: b"no program")
    with pytest.raises(policies.CompileError, match="compiling for NVIDIA H200 failed: .*rror"):
        policies.compile_ahead(Wave(), X, target=gpu, cache=False)


def test_files_of_the_user_do_not_shadow_pythons_own(gpu, tmp_path, monkeypatch):
    for name in ("resource", "json", "layers", "hlo"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert policies.compile_ahead(Wave(), X, target=gpu, cache=False).host["temp"] == KEPT


SLOW = """
import jax, jax.numpy as jnp
from overspill import policies
def deep(w, x):
    for i in range(60):
        x = jnp.sin(x @ w) + jax.nn.softmax(x * i)
    return x.sum()
policies.compile_ahead(deep, jnp.zeros((64, 64)), jnp.zeros((64, 64)), target="h200", cache=False)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_no_compiler_behind(gpu, tmp_path, how):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", SLOW], env=environment)

    def compilers():
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(tmp_path) in path.read_text():
                    found.append(path)
            except OSError:
                continue
        return found

    try:
        deadline = time.monotonic() + 120
        while not compilers() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        assert compilers()
    finally:
        process.send_signal(how)
        process.wait()
    deadline = time.monotonic() + 60
    while (compilers() or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not compilers() and not list(tmp_path.iterdir())


def test_arguments_in_host_memory(gpu):
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    host, device = (NamedSharding(mesh, spec, memory_kind=kind) for kind in ("pinned_host", "device"))

    def both(state, x):
        value, pullback = jax.vjp(lambda x: jnp.sin(x) * jax.device_put(state, jax.memory.Space.Device), x)
        return pullback(value)

    state, x = (jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=place) for place in (host, device))
    made = policies.compile_ahead(both, state, x, target=gpu)
    assert made.host["argument"] == made.device["argument"] == 64 * 128 * 4 // 4 and made.devices == 4


def test_a_tpus_scratch_is_what_its_compiler_says(tpu, monkeypatch):
    heard = []
    monkeypatch.setattr(ahead, "scratch", lambda said: heard.append(ahead_compiler.scratch(said)) or heard[-1])
    made = policies.compile_ahead(policies.place(Wave(), "save_all"), X, target=tpu, cache=False)
    assert heard == [made.device["temp"]] and made.device["code"] > 0
    assert made.device_bytes == sum(made.device.values()) - 2 * made.device["alias"]


def test_a_tpu_keeps_on_the_host_what_is_annotated(tpu):
    proof = policies.prove(Wave(), X, target=tpu)
    assert proof.planned_bytes == proof.host_bytes == KEPT
    big = jax.ShapeDtypeStruct((2**26, 128), jnp.float32)
    refused = policies.compile_ahead(policies.place(Wave(), "save_all"), big, target="tpu-v5e")
    assert not refused.fits and "hbm" in refused.error.lower() and refused.device["temp"] > 2**34
