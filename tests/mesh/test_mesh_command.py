"""`overspill mesh`, meshes and rules as text."""

import json
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType
from rich.console import Console
from typer.testing import CliRunner

from overspill.zoo.command import app
from overspill.zoo.inspecting import Options, prepare
from overspill.zoo.meshes import abstract_mesh, layout_of, make_mesh as make_mesh_of, parse_mesh, parse_rules

LLAMA, DEEPSEEK = "overspill-llama-tiny", "overspill-deepseek-tiny"


@pytest.fixture(autouse=True, scope="module")
def same_platforms():
    """The command keeps JAX to the CPU: in its own process, and here no longer than these tests."""
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


def invoke(*arguments, command="mesh"):
    return CliRunner().invoke(app, [command, *map(str, arguments)], env={"COLUMNS": "200"})


def inspect(model, mesh):
    inspection = prepare(Options(model=model, mesh=mesh, sequence_length=32))
    inspection(Console(quiet=True))
    return inspection


@pytest.fixture(scope="module")
def inspected(same_platforms):
    return inspect(LLAMA, "data=2,fsdp=2,tensor=2")


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("data=2,fsdp=4", {"data": 2, "fsdp": 4}),
        (" tensor = 8 ", {"tensor": 8}),
        ("expert=1,data=3", {"expert": 1, "data": 3}),
    ],
)
def test_meshes_as_text(text, sizes):
    assert parse_mesh(text) == sizes
    assert list(parse_mesh(text)) == list(sizes)
    assert dict(abstract_mesh(text).shape) == sizes


@pytest.mark.parametrize("text", ["", "data", "data=", "data=0", "data=-1", "data=two", "=2", "data=2,", "da ta=2",
                                  "data=2.5", "data:2", "data=99999999999"])  # fmt: skip
def test_malformed_meshes(text):
    with pytest.raises(ValueError, match="write axes and how many devices each has, such as data=2,fsdp=4"):
        parse_mesh(text)


def test_an_axis_twice():
    with pytest.raises(ValueError, match="mesh 'data=2,data=2' has axis 'data' twice"):
        parse_mesh("data=2,data=2")


def test_rules_as_text():
    assert parse_rules(["kv_heads=", "embed = fsdp+data", "mlp=tensor,fsdp"]) == {
        "kv_heads": (), "embed": ("fsdp", "data"), "mlp": ("tensor", "fsdp")
    }  # fmt: skip
    with pytest.raises(ValueError, match="rule 'kv_heads': write a logical axis"):
        parse_rules(["kv_heads"])
    with pytest.raises(ValueError, match="two rules for 'embed'"):
        parse_rules(["embed=", "embed=fsdp"])


def test_rules_change_presets():
    table = layout_of(abstract_mesh("data=2,tensor=4"), ["kv_heads=", "embed=data"]).table
    assert table["heads"] == ("tensor",) and table["embed"] == ("data",) and "kv_heads" not in table


def test_axes_of_ones_own_need_a_rule():
    mesh = abstract_mesh("data=2,rows=4")
    assert layout_of(mesh, ["embed=rows"]).axes("embed") == ("rows",)
    with pytest.raises(ValueError, match="mesh axis 'rows' is no preset .* as in embed=rows"):
        layout_of(mesh)


def test_meshes_over_devices():
    mesh = make_mesh_of("data=2,fsdp=2", AxisType.Explicit)
    assert mesh.devices.flatten().tolist() == jax.devices()[:4]
    assert set(mesh.axis_types) == {AxisType.Explicit}
    with pytest.raises(ValueError, match="mesh data=64 needs 64 devices, and there are 8: .* --cpu-devices 64"):
        make_mesh_of("data=64")


def test_arguments_weigh_what_is_said(inspected):
    """The compiler's own count of a device's arguments: the state's parts, and the batch."""
    rows, row = 4 // (2 * 2), 32 * (4 * 4 + 1)
    assert inspected.argument_bytes == sum(part.shard_bytes for part in inspected.state()) + rows * row


def test_collectives_of_presets(inspected):
    layers, weights = 8, 7
    found = inspected.collectives
    assert found.known and all(entry.axes for entry in found)
    # Weights in parts are gathered for each layer, forward and backward; never over what computes in parts.
    assert found.of("all-gather", "fsdp").runs >= 2 * layers * weights
    assert max(entry.bytes for entry in found.of("all-gather", "fsdp")) == 176 * 128 * 4
    assert max((entry.bytes for entry in found.of("all-gather", "tensor")), default=0) < 176 * 128 * 2
    # Attention and MLP sum their features, forward and backward; copies of weights add up their gradients.
    assert found.of("all-reduce", "tensor").runs >= 2 * 2 * layers
    assert found.of("all-reduce", "data").runs >= layers
    # Features of tokens from those that store them, and their gradients back.
    exchanged = found.of("all-to-all")
    assert exchanged.runs == 2 and {entry.axes for entry in exchanged} == {("fsdp",)}


def test_data_parallelism_only_sums():
    assert {(entry.kind, entry.axes) for entry in inspect(LLAMA, "data=8").collectives} == {("all-reduce", ("data",))}


def test_state_of_one_device_is_all_of_it():
    inspection = prepare(Options(model=LLAMA, mesh="data=1", compile=False))
    total = inspection.plan.bytes // 2  # bfloat16
    parts = {part.name: part for part in inspection.state()}
    assert parts["parameters"].bytes == parts["parameters"].shard_bytes == 4 * total
    assert parts["optimizer"].bytes == pytest.approx(8 * total, abs=16)


def test_optimizer_is_cut_like_parameters():
    inspection = prepare(Options(model=DEEPSEEK, mesh="fsdp=2,expert=4", compile=False))
    parts = {part.name: part for part in inspection.state()}
    masters = sum(row.shard_bytes * 4 // (4 if row.dtype == "float32" else 2) for row in inspection.plan.rows
                  if not row.path.endswith("router.bias.value"))  # fmt: skip
    assert parts["parameters"].shard_bytes == masters
    assert parts["optimizer"].shard_bytes == pytest.approx(2 * masters, abs=16)
    assert parts["router biases"].bytes == parts["router biases"].shard_bytes > 0


def test_state_in_host_memory_and_micro_batches():
    options = Options(model=LLAMA, mesh="fsdp=2", accumulate=3, state_memory=("optimizer.*=host",), compile=False)
    inspection = prepare(options)
    assert inspection.batch_size == 6
    parts = {(part.name, part.memory): part.shard_bytes for part in inspection.state()}
    assert set(parts) == {("parameters", "device"), ("optimizer", "host"), ("counters and key", "device")}
    assert "in host memory for it" in str(inspection.state_table(inspection.state()))


def test_command_shows_and_writes_everything(tmp_path):
    out = tmp_path / "mesh.json"
    result = invoke(LLAMA, "--mesh", "data=2,fsdp=2", "--sequence-length", 64, "--batch-size", 8, "-r", "vocab=data",
                    "--dtype", "float32", "-p", "save_all", "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("1,510,016 parameters", "mesh of 4 devices: batch over data*fsdp", "vocab over data", "mlp.gate_proj",
                 "on each device of data=2, fsdp=2", "optimizer", "all-gather", "8 x 64 tokens, compiled in",
                 "4 CPU devices"):  # fmt: skip
        assert text in result.output, text
    written = json.loads(out.read_text())
    assert written["mesh"] == {"data": 2, "fsdp": 2} and written["rules"]["vocab"] == ["data"]
    shard = next(row for row in written["parameters"] if row["path"] == "embedding.weight")
    assert shard["shape"] == [260, 128] and shard["shard"] == [130, 64] and shard["cut_over"] == ["data", "fsdp"]
    assert {entry["kind"] for entry in written["collectives"]} >= {"all-gather", "all-reduce"}
    assert written["argument_bytes"] > 0 and [part["name"] for part in written["state"]][0] == "parameters"


def test_any_number_of_devices_without_compiling():
    result = invoke("llama-3.1-405b", "--mesh", "fsdp=8192,tensor=8", "--no-compile", "--batch-size", 8192)
    assert result.exit_code == 0, result.output
    assert "mesh of 65,536 devices" in result.output and "Collectives" not in result.output


def test_rules_that_reach_nothing_are_reported():
    result = invoke(LLAMA, "--mesh", "data=2", "--no-compile", "-r", "experts=data")
    assert result.exit_code == 0, result.output
    assert "the rule for 'experts' reaches no array and no activation of this model" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([LLAMA, "--mesh", "data"], "mesh 'data': write axes"),
        ([LLAMA, "--mesh", "rows=2"], "mesh axis 'rows' is no preset"),
        ([LLAMA, "--mesh", "tensor=8"], "'embedding.weight' [260, 128]: dimension 0 is 260 vocab"),
        ([LLAMA, "--mesh", "tensor=4"], "or --rule kv_heads= to keep it whole"),
        ([LLAMA, "--mesh", "data=2", "-r", "head=data"], "rule 'head': not one of the logical axes"),
        ([LLAMA, "--mesh", "data=2", "-r", "embed=fsdp"], "rule 'embed': the mesh has no axis 'fsdp'"),
        ([LLAMA, "--mesh", "data=2", "-r", "embed"], "rule 'embed': write a logical axis"),
        ([LLAMA, "--mesh", "data=2", "--batch-size", 3], "3 batch, which can't be cut into 2 equal"),
        ([LLAMA, "--mesh", "sequence=2", "--sequence-length", 33], "33 sequence, which can't be cut into 2 equal"),
        ([LLAMA, "--mesh", "data=2", "--sequence-length", 99999], "is longer than overspill-llama-tiny was made for"),
        ([LLAMA, "--mesh", "data=16"], "mesh data=16: JAX runs with 8 CPU devices already"),
        ([LLAMA, "--mesh", "data=99999"], "99,999 CPU devices: from 1 to 4,096 can be; --no-compile"),
        ([LLAMA, "--mesh", "data=2", "--batch-size", 4, "--accumulate", 3], "cut into 3 equal micro-batches"),
        ([LLAMA, "--mesh", "data=2", "--batch-size", 3, "--accumulate", 3], "1 batch, which can't be cut into 2 equal"),
        ([LLAMA, "--mesh", "data=2", "--state-memory", "optimizer.*"], "state memory 'optimizer.*': write what"),
        ([LLAMA, "--mesh", "data=2", "--state-memory", "optim.*=host"], "'optim.*' matches nothing in the state"),
        ([LLAMA, "--mesh", "data=2", "--dtype", "int8"], "dtype 'int8' is not one of float32, bfloat16"),
        ([LLAMA, "--mesh", "data=2", "-p", "*.mpl.*=host"], "'*.mpl.*' matches no activation"),
        (["llama-9", "--mesh", "data=2"], "llama-9"),
        ([LLAMA, "--mesh", "data=2", "--json", "/nowhere/x.json"], "there is no folder '/nowhere'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_devices_are_made_for_the_mesh(tmp_path):
    """In a process of its own, which has one CPU device by default."""
    out = tmp_path / "mesh.json"
    command = ["overspill", "mesh", DEEPSEEK, "--mesh", "expert=2", "--sequence-length", "32", "--json", str(out)]
    code = f"import sys; sys.argv = {command!r}; from overspill.zoo.command import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for 2 CPU devices" in done.stdout
    found = json.loads(out.read_text())["collectives"]
    assert any(entry["kind"] == "all-to-all" and entry["axes"] == ["expert"] for entry in found)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mesh", "data"], "mesh 'data': write axes"),
        (["--mesh", "data=64"], "mesh data=64 needs 64 devices"),
        (["--mesh", "data=2", "--rule", "embed"], "rule 'embed': write a logical axis"),
        (["--cpu-devices", 99999], "99,999 CPU devices: from 1 to 4,096 can be"),
        (["--cpu-devices", 64], "JAX runs with 8 CPU devices already, and can't have 64 any more"),
    ],
)
def test_training_over_no_such_mesh(arguments, message):
    result = invoke(*arguments, command="train")
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_experts_in_rounds():
    options = Options(model=DEEPSEEK, mesh="expert=4", sequence_length=32, expert_rounds=4, compile=False)
    inspection = prepare(options)
    assert inspection.model.moe_layers.segments[0].moe.rounds.count == 4
    assert prepare(Options(model=DEEPSEEK, mesh="expert=4", compile=False)).model.moe_layers.segments[0].moe.dispatched
