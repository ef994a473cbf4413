"""`overspill prove`: placements side by side. Most of it with a stand-in for the compiler."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import sys

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from overspill.policies import ahead, proof as proofs
from overspill.policies.accelerators import target as find_target, targets
from overspill.policies.activation import annotations
from overspill.policies.ahead import Ahead, CompileError
from overspill.policies.evidence import Evidence, HostBuffer, Transfer
from overspill.policies.placing import presets
from overspill.policies.report import Table
from overspill.policies.residuals import Fault, census
from overspill.zoo import proving
from overspill.zoo.building import abstract
from overspill.zoo.command import app
from overspill.zoo.hf_config import from_config
from overspill.zoo.proving import Options, choose_mesh, one_host, prepare, shortened, variants
from overspill.zoo.proving_report import fitted

LLAMA, DEEPSEEK = "overspill-llama-tiny", "overspill-deepseek-tiny"
GIB = 2**30
HLO = {"bfloat16": "bf16", "float32": "f32", "int32": "s32", "bool": "pred"}
CUDA = [name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if importlib.util.find_spec(name.replace("-", "_"))]


@pytest.fixture(autouse=True, scope="module")
def same_platforms():
    """The command keeps JAX to the CPU: in its own process, and here no longer than these tests."""
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


class Compiler:
    """A stand-in for `compile_ahead` that compiles everything as annotated; `change` makes what it gives another."""

    def __init__(self, change=lambda calls, found: found):
        self.change = change
        self.calls = []  # (args, options)
        self.found = []

    def __call__(self, step, *args, target, **options):
        self.calls.append((args, options))
        kept = [e for e in census(step, *args).entries if e.memory == "host"]
        buffers = tuple(
            HostBuffer(HLO[e.dtype], (e.shard_bytes // e.arrays // jax.numpy.dtype(e.dtype).itemsize,),
                       e.shard_bytes // e.arrays, e.arrays, (e.label,))
            for e in kept
        )  # fmt: skip
        size = sum(e.shard_bytes for e in kept)
        moves = (Transfer("out", "f32", (1,), 4, 3, True, True, 9, 1, "", "a"),
                 Transfer("in", "f32", (1,), 4, 1, True, False, 0, 0, "", "b"))  # fmt: skip
        evidence = Evidence(buffers, moves if size else (), (0, 0), (), 0, (), 0, size)
        zeros = dict.fromkeys(("argument", "output", "alias", "temp", "code"), 0)
        found = Ahead(
            target=target.name, platform=target.platform, description=target.description, devices=8, jax="0",
            capacity=100 * GIB, error=None,
            device=zeros | {"argument": 30 * GIB, "temp": 50 * GIB, "output": 30 * GIB, "alias": 29 * GIB},
            host=zeros | {"temp": size}, evidence=evidence, flops=None, compile_seconds=41.0, lower_seconds=2.0,
            compiler_memory=3 * GIB, flags={},
        )  # fmt: skip
        self.found.append(found)
        return self.change(len(self.calls), found)


@pytest.fixture
def compiler(monkeypatch):
    """Compiles nothing, and counts."""
    stand_in = Compiler()
    monkeypatch.setattr(proving, "require_compiler", lambda platform: "a stand-in 1.0")
    monkeypatch.setattr(proofs, "compile_ahead", stand_in)
    return stand_in


def run(*arguments, model=LLAMA, target="gb200"):
    short = ["--sequence-length", "32", "--layers", "2"]
    return CliRunner().invoke(app, ["prove", model, "--target", target, *short, *map(str, arguments)])


def row(output, name):
    """The cells of a line that begins with `name`."""
    line = next(line.strip() for line in output.splitlines() if line.strip().startswith(f"{name} "))
    return [cell for cell in line.removeprefix(name).split("  ") if cell.strip()]


@pytest.mark.parametrize(
    ("model", "devices", "mesh"),
    [
        ("llama-3.1-405b", 128, "fsdp=128"),
        ("deepseek-v3", 128, "fsdp=16,expert=8"),
        ("deepseek-v3", 8, "expert=8"),
        ("deepseek-v3", 12, "fsdp=3,expert=4"),
        ("deepseek-v3", 7, "fsdp=7"),
        ("deepseek-v3", 1, "fsdp=1"),
        ("mixtral-8x7b", 64, "fsdp=8,expert=8"),
    ],
)
def test_the_mesh_that_is_chosen(model, devices, mesh):
    assert choose_mesh(from_config(model), devices) == mesh


def test_experts_that_eight_does_not_divide_and_models_without_any():
    config = from_config("deepseek-v3")
    dozen = dataclasses.replace(config, n_routed_experts=12, n_group=1, topk_group=1)
    assert choose_mesh(dozen, 16) == "fsdp=4,expert=4" and choose_mesh(dozen, 24) == "fsdp=6,expert=4"
    dense = dataclasses.replace(config, first_k_dense_replace=config.num_hidden_layers)
    assert choose_mesh(dense, 16) == "fsdp=16"


@pytest.mark.parametrize(("layers", "dense"), [(61, 3), (8, 2), (4, 1), (2, 1), (1, 0), (None, 3)])
def test_shortened_models_keep_layers_with_experts(layers, dense):
    config = shortened(from_config("deepseek-v3"), layers)
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (layers or 61, dense)
    assert any("moe" in row.path for row in annotations(abstract(config)))


def test_shortened_models_keep_what_their_layers_are():
    config = from_config("gpt-oss-20b")
    assert shortened(config, 3).layer_types == config.layer_types[:3]
    with pytest.raises(ValueError, match="30 layers: the model has 24, and can be shortened to 1 to 24"):
        shortened(config, 30)


def test_each_text_is_one_variant():
    model = abstract(LLAMA)
    texts = ("offload_qkv", "offload_qkv, *.mlp.gate=host", "recompute_all,*.attention.key=host,*.attention.key=device")
    family = variants(model, texts)
    assert tuple(family) == texts
    placed = {text: {a.path: str(a.placement) for a in annotations(m)} for text, m in family.items()}
    gate, key = "layers.segments.0.mlp.gate", "layers.segments.0.attention.key"
    assert [placed[text][gate] for text in texts] == ["recompute", "host", "recompute"]
    assert [placed[text][key] for text in texts] == ["host", "host", "device"]


def test_by_default_every_preset_that_fits():
    assert [*variants(abstract(DEEPSEEK), ())] == [*presets()]
    assert [*variants(abstract(LLAMA), ())] == [name for name in presets() if name != "offload_latents"]


def test_one_host_or_what_the_target_says():
    assert [one_host(find_target(name)) for name in ("gb200", "h200", "tpu-v5p", "tpu-v5p:4x4x8")] == [4, 8, 4, 128]
    assert one_host(find_target("tpu-7x:2x2x2")) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gb20"], "there is no target 'gb20'; did you mean gb200"),
        (["--devices", "8", "--mesh", "fsdp=4"], "--mesh fsdp=4 has 4 devices and --devices says 8: give one of both"),
        (["--mesh", "fsdp"], "write axes and how many devices each has"),
        (["--devices", "7"], "can't be cut into 7 equal parts over mesh axis 'fsdp'"),
        (["--devices", "7"], "--rule embed= to keep it whole on every device (--mesh was chosen: fsdp=7)"),
        (["--target", "tpu-v5e", "--devices", "24"], "tpu-v5e has no topology with 24 devices: 4, 8, 16, 32"),
        (["--target", "tpu-v5p:2x2x2", "--devices", "4"], "tpu-v5p:2x2x2 has 8 devices, and 4 are asked for"),
        (["-p", "offload_qkw"], "no preset is called 'offload_qkw'; did you mean 'offload_qkv'"),
        (["-p", "offload_qkv,*.mlp.gat=host"], "placement rule '*.mlp.gat' matches no activation; did you mean"),
        (["-p", "offload_latents"], "preset 'offload_latents' doesn't fit Llama"),
        (["-p", ""], "no preset is called ''"),
        (["--dtype", "float16"], "dtype 'float16' is not one of float32, bfloat16"),
        (["--segments", "a"], "segments are layer indices"),
        (["--sequence-length", "9999"], "sequence length 9999 is longer than overspill-llama-tiny was made for"),
        (["--batch", "6", "--accumulate", "4"], "batch size 6 can't be cut into 4 equal micro-batches"),
        (["--batch-size", "6"], "can't be cut into 4 equal parts"),
        (["--state-memory", "optimiser.*=host"], "optimiser.*"),
        (["--layers", "99"], "99 layers: the model has 8"),
        (["--json", "/none/a.json"], "there is no folder '/none'"),
        (["--json", "."], "it is a folder"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_traced(compiler, monkeypatch, arguments, message):
    monkeypatch.setattr(proving, "examine", None)
    done = run(*arguments)
    assert done.exit_code == 2 and not done.stdout, done.output
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_compiler_is_told_before_anything_slow(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ahead.importlib.metadata, "version", version)
    monkeypatch.setattr(proving, "from_config", None)
    done = run(target="h200")
    assert done.exit_code == 2 and "pip install 'overspill[gpu-compile]'" in done.stderr and "GPUs" in done.stderr
    done = run(target="tpu-v5e")
    assert done.exit_code == 2 and "pip install 'overspill[tpu-compile]'" in done.stderr


def test_placements_side_by_side(compiler, tmp_path):
    path = tmp_path / "out.json"
    both = ["offload_qkv", "offload_qkv,*.mlp.gate=host"]
    done = run("--devices", 8, "-p", both[0], "-p", both[1], "--segments", 1, "--json", path)
    assert done.exit_code == 0, done.output
    assert "8 x NVIDIA GB200 as fsdp=8 (chosen; --mesh takes another)" in done.stdout
    assert "a training step on 8 x 32 tokens: AdamW, master weights and moments in float32, bfloat16" in done.stdout
    report = json.loads(path.read_text())
    assert not [*tmp_path.glob(".*")], "the file is written whole, and nothing is left beside it"
    first, second = report["variants"]
    assert [one["placements"] for one in report["variants"]] == both
    assert report["complete"] and not report["failed"] and report["mesh"] == {"fsdp": 8} and report["mesh_chosen"]
    assert report["layers"] == 2 and report["segments"] == [1] and report["devices_per_host"] == 4
    # What the compiler said: 30 + 50 + 30 - 29 GiB.
    assert first["device_bytes"] == 81 * GIB and first["fits"] and first["verdict"] == "proved"
    # Two layers of one row of 32 tokens in bfloat16: 4 heads and twice 2 of 32; and the gate's 352 features.
    size = 2 * 32 * 2 * from_config(LLAMA).intermediate_size
    assert second["host_bytes"] == first["host_bytes"] + size > size
    assert second["host_bytes_per_host"] == 4 * second["host_bytes"]
    assert first["proof"]["planned_bytes"] == first["proof"]["host_bytes"] == first["host_bytes"]
    cells = [cell.strip() for cell in row(done.stdout, f"(2) {both[1]}")]
    assert cells[:4] == ["30.0 GiB", "50.0 GiB", "81.0 GiB", "yes"] and cells[-4:] == ["yes", "75%", "0", "41 s"]
    # Activations, the largest first, with where each placement puts them.
    listed = report["activations"]
    assert [one["bytes"] for one in listed] == sorted((one["bytes"] for one in listed), reverse=True)
    gates = [one for one in listed if one["path"].endswith("mlp.gate")]
    assert [one["path"].split(".")[2] for one in gates] == ["0", "1"] and sum(one["bytes"] for one in gates) == size
    assert gates[0]["waits"] == {both[0]: "recomputed", both[1]: "host"}
    assert [c.strip() for c in row(done.stdout, "layers.segments.0.mlp.gate")][1:] == ["recompute", "host"]
    assert "(2) offload_qkv,*.mlp.gate=" in done.stdout  # cut short at the head of a column
    assert len(compiler.calls) == 2


def test_what_is_asked_for_arrives_at_the_compiler(compiler, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    options = ["--state-memory", "optimizer.*=host", "--accumulate", 2, "--dtype", "float32", "--mesh", "fsdp=2,data=2"]
    done = run(*options, "-p", "offload_all", "--no-flags")
    assert done.exit_code == 0, done.output
    assert "as fsdp=2,data=2, JAX" in done.stdout and "without the flags of overspill env" in done.stdout
    assert "8 x 32 tokens in 2 micro-batches" in done.stdout and "on the host: optimizer.*" in done.stdout
    ((state, batch), given) = compiler.calls[0]
    assert given["flags"] == {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    assert batch.tokens.shape == (8, 32)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert kinds == {"pinned_host"} and {x.sharding.mesh.size for x in state.params.values()} == {4}
    whole = run(*options[:2], *options[4:], "--batch", 8, "-p", "offload_all")
    assert compiler.calls[1][1]["flags"] is None
    # One of two micro-batches at a time, of as many rows in all.
    half, full = (one.host_bytes for one in compiler.found)
    assert 0 < 2 * half == full, whole.output


def test_rules_that_reach_nothing_are_said_once(compiler):
    done = run("--rule", "experts=fsdp", "-p", "save_all", "-p", "offload_all")
    assert done.exit_code == 0, done.output
    assert sum("experts" in line for line in done.stdout.splitlines()) == 1


def test_a_failed_proof_is_printed_and_the_others_go_on(compiler, tmp_path):
    def forget(calls, found):
        if calls != 1:
            return found
        key, *rest = sorted(found.evidence.host_buffers, key=lambda buffer: "key" not in buffer.op_names[0])
        size = sum(buffer.bytes * buffer.count for buffer in rest)
        evidence = dataclasses.replace(found.evidence, host_buffers=tuple(rest), host_peak_bytes=size)
        return dataclasses.replace(found, evidence=evidence, host=found.host | {"temp": size})

    compiler.change = forget
    done = run("-p", "offload_qkv", "-p", "offload_all", "--json", tmp_path / "out.json")
    assert done.exit_code == 1
    message = next(line for line in done.stdout.splitlines() if line.startswith("offload_qkv: "))
    assert "is offloaded in the traced program" in message and "has no host" in message
    assert row(done.stdout, "offload_qkv")[-4].strip() == "NO" and row(done.stdout, "offload_all")[-4].strip() == "yes"
    report = json.loads((tmp_path / "out.json").read_text())
    assert [one["verdict"] for one in report["variants"]] == ["not applied", "proved"] and report["failed"]
    assert report["variants"][0]["proof"]["faults"][0]["found"] == 0


@pytest.mark.parametrize(
    "error",
    [
        CompileError("compiling for NVIDIA GB200 failed: the compiler was ended by signal 6"),
        proofs.OffloadNotApplied(Fault("layers.segments.0.mlp.gate", "'gate' can't be offloaded", "remat3")),
    ],
)
def test_a_variant_that_cannot_be_compiled_is_shown_and_the_others_go_on(compiler, error):
    def fail(calls, found):
        if calls == 1:
            raise error
        return found

    compiler.change = fail
    done = run("-p", "offload_qkv", "-p", "recompute_all")
    assert done.exit_code == 1
    assert f"offload_qkv: {error}" in " ".join(done.stdout.split())
    assert row(done.stdout, "offload_qkv")[-4].strip() == "ERROR"
    assert row(done.stdout, "recompute_all")[-4].strip() == "yes"
    assert "recompute_all" in done.stdout.split("Largest activations")[1]


def test_not_fitting_is_no_failure(compiler, tmp_path):
    big = {"argument": 30 * GIB, "temp": 100 * GIB, "output": 0, "alias": 0, "code": 0}
    host = big | {"argument": 300 * GIB, "temp": 0}
    compiler.change = lambda calls, found: dataclasses.replace(found, device=big, host=host)
    done = run("-p", "recompute_all", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    assert "NO, 30.0 GiB over" in done.stdout and "1.17 TiB, TOO MUCH" in done.stdout
    (one,) = json.loads((tmp_path / "out.json").read_text())["variants"]
    assert not one["fits"] and not one["fits_host"] and one["verdict"] == "proved"


def test_what_a_tpu_refuses_is_no_failure(compiler):
    none = Evidence((), (), (0, 0), (), 0, (), 0, 0)
    sizes = {"argument": 0, "temp": 130 * GIB, "output": 0, "alias": 0, "code": 0}
    compiler.change = lambda calls, found: dataclasses.replace(
        found, device=sizes, evidence=none, error="RESOURCE_EXHAUSTED: Used 130.00G of 95.74G hbm"
    )
    done = run("-p", "offload_all", target="tpu-v5p")
    assert done.exit_code == 0, done.output
    cells = [cell.strip() for cell in row(done.stdout, "offload_all")]
    assert cells[:4] == ["-", "-", "130 GiB", "NO, 30.0 GiB over"] and cells[-4] == "traced"
    assert "offload_all: the compiler refuses what doesn't fit: RESOURCE_EXHAUSTED: Used 130.00G" in done.stdout


def test_ctrl_c_shows_and_writes_what_is_done(compiler, tmp_path):
    def interrupt(calls, found):
        if calls == 2:
            raise KeyboardInterrupt
        return found

    compiler.change = interrupt
    path = tmp_path / "out.json"
    done = run("-p", "offload_qkv", "-p", "offload_all", "-p", "save_all", "--json", path)
    assert done.exit_code == 130
    assert "interrupted: 1 of 3 placements are done" in done.stdout
    assert row(done.stdout, "offload_qkv")[-4].strip() == "yes" and "offload_all" not in done.stdout
    report = json.loads(path.read_text())
    assert [one["placements"] for one in report["variants"]] == ["offload_qkv"] and not report["complete"]
    assert len(compiler.calls) == 2


def test_ctrl_c_before_anything_is_done(compiler, tmp_path, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(proving, "examine", interrupt)
    done = run("-p", "offload_qkv", "--json", tmp_path / "out.json")
    assert done.exit_code == 130 and "interrupted: 0 of 1 placements are done" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["variants"] == [] and report["activations"] == [] and not report["complete"]


def test_a_terminal_shows_all_columns_and_what_is_compiled(compiler, monkeypatch):
    console = Console(force_terminal=True, width=80, color_system=None, file=io.StringIO())
    said = []
    monkeypatch.setattr(console, "status", lambda text: said.append(text) or contextlib.nullcontext())
    family = prepare(Options(LLAMA, "gb200", sequence_length=32, layers=2, placements=("offload_qkv", "offload_all")))
    assert family(console) == 0
    assert [text.split(":")[0] for text in said] == ["offload_qkv (1 of 2)", "offload_all (2 of 2)"]
    lines = console.file.getvalue().split("Largest activations")[0].splitlines()
    assert max(map(len, lines)) <= 80
    for column in ("arguments", "scratch", "fits", "host of 4", "found", "overlapped", "XLA recomputes", "compiled in"):
        assert sum(column in line for line in lines) >= 1, column
    assert sum(line.strip().startswith("offload_qkv ") for line in lines) >= 2


def test_tables_are_cut_by_columns():
    table = Table(("a", "bb", "cc", "dd"), [("one", "x" * 30, "y" * 30, "z" * 30)], title="T", footer="F")
    wide, narrow = (fitted(table, Console(width=width, file=sys.stderr)) for width in (120, 80))
    assert [one.columns for one in wide] == [("a", "bb", "cc", "dd")] and (wide[0].title, wide[0].footer) == ("T", "F")
    assert [one.columns for one in narrow] == [("a", "bb", "cc"), ("a", "dd")]
    assert [(one.title, one.footer) for one in narrow] == [("T", ""), ("", "F")]
    assert narrow[1].rows == [("one", "z" * 30)]


def test_help_lists_the_targets():
    done = CliRunner().invoke(app, ["prove", "--help"], env={"COLUMNS": "200"})
    text = " ".join(done.stdout.replace("│", " ").split())
    assert done.exit_code == 0 and ", ".join(targets()) in text


@pytest.mark.skipif(not CUDA, reason="no compiler for GPUs is installed (pip install 'overspill[gpu-compile]')")
def test_a_family_compiled_for_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    path = tmp_path / "out.json"
    options = ["--sequence-length", "256", "--layers", "3", "--devices", "8", "--json", str(path)]
    chosen = ["-p", "save_all", "-p", "offload_qkv", "--state-memory", "optimizer.*=host"]
    done = CliRunner().invoke(app, ["prove", LLAMA, "--target", "h200", *options, *chosen])
    assert done.exit_code == 0, done.output
    saved, moved = json.loads(path.read_text())["variants"]
    assert saved["verdict"] == moved["verdict"] == "proved" and saved["fits"] and moved["fits"]
    assert moved["proof"]["planned_bytes"] == moved["proof"]["host_bytes"] > 0 == saved["proof"]["host_bytes"]
    # The moments are arguments on the host in both; the rest is what is offloaded.
    assert moved["host_bytes"] - saved["host_bytes"] <= moved["proof"]["host_bytes"]
    assert saved["host_bytes"] > 0


def test_a_loop_over_micro_batches_is_compiled_once(gpu):
    """Experts' gradients are summed in it: where XLA pipelines such sums, the loop is there four times."""
    placed = ("recompute_all,moe_layers*.block_input=host",)
    options = Options(DEEPSEEK, gpu, mesh="fsdp=2", batch_size=8, sequence_length=64, accumulate=2, placements=placed)
    outcome = prepare(options).examine(*placed)
    assert outcome.error is None and not outcome.proof.faults
    (buffer,) = outcome.proof.compiled.evidence.host_buffers
    assert buffer.shape == (3, 2, 64, 128) and buffer.count == 1


def test_micro_batches_with_a_head_of_its_own_are_compiled_for_tpus(tpu):
    """XLA for TPUs stops where it can take the sums of the head's gradient over devices out of the loop."""
    size = {"batch_size": 16, "sequence_length": 128, "layers": 1}
    options = Options("llama-3.1-8b", tpu, mesh="fsdp=8", accumulate=2, placements=("recompute_all",), **size)
    outcome = prepare(options).examine("recompute_all")
    assert outcome.error is None and not outcome.proof.faults
