import importlib.util
import os
import re
import shlex
import subprocess
import sys

import jax
import pytest

from overspill.policies import flags as rooms
from overspill.policies.accelerators import target, targets
from overspill.policies.flags import FRACTION, LIBTPU, POOL, XLA, Flag, Flags, backends_started, xla_flags

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
PIPELINED = "xla_gpu_enable_pipelined_host_offloading"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """No machine with GPUs, and nothing of the environment that the tests run in."""
    monkeypatch.setattr(rooms, "_machine_bytes", lambda: None)


@pytest.fixture
def invented(monkeypatch):
    """Two flags that no jaxlib knows, among the others."""
    added = (Flag("xla_gpu_overspill_one", "true", XLA, "made up", ">=99"), Flag("xla_two", "7", XLA, "too", ">=99"))
    monkeypatch.setattr(rooms, "_CUDA", (added[0], *rooms._CUDA, added[1]))
    return added


def values(flags):
    return {flag.name: flag.value for flag in flags}


@pytest.mark.parametrize("name", list(targets()))
def test_every_target_has_its_set(name):
    flags = xla_flags(name)
    assert flags.target == target(name)
    platform = flags.target.platform
    assert {flag.variable for flag in flags} == ({XLA, FRACTION, POOL} if platform == "cuda" else {LIBTPU})
    for flag in flags:
        assert flag.reason and "\n" not in flag.reason and re.fullmatch(r">=0\.\d+", flag.versions)
    assert len({flag.name for flag in flags}) == len(flags)
    assert not flags.unknown


def test_the_set_for_gpus():
    found = values(xla_flags("gb200"))
    assert found == {
        "xla_gpu_enable_latency_hiding_scheduler": "true",
        "xla_gpu_enable_pipelined_host_offloading": "true",
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_memory_limit_slop_factor": "95",
        LIMIT: "1",
        "xla_gpu_enable_pipelined_reduce_scatter": "false",
        FRACTION: "0.92",
        POOL: "670",
    }


def test_the_set_for_tpus():
    found = values(xla_flags("tpu-v5p:4x4x4"))
    assert found["xla_tpu_host_transfer_overlap_limit"] == "24"
    assert found["xla_tpu_enable_all_experimental_scheduler_features"] == "true"
    assert len(found) == 11


def test_it_is_a_sequence_that_prints_itself():
    flags = xla_flags("h200")
    assert flags[0].name in str(flags) and flags[-1].name == POOL
    assert list(flags[:2]) == list(flags)[:2]
    assert flags[0] in flags and len(flags) == len(list(flags))
    assert "NVIDIA H200" in str(flags) and "<table>" in flags._repr_html_()
    assert flags[1].reason in str(flags)


@pytest.mark.parametrize("name", ["h100", "tpu-v6e"])
def test_everything_is_known_here(name):
    flags = xla_flags(name)
    if name == "h100":
        assert flags.checked == f"jaxlib {jax.lib.__version__}"
    elif importlib.util.find_spec("libtpu"):
        assert flags.checked.startswith("libtpu ")
    else:
        assert flags.checked == "" and "not checked: there is no libtpu here" in str(flags)


def test_unknown_flags_are_left_out_and_reported(invented):
    flags = xla_flags("h200")
    assert flags.unknown == invented
    assert not set(invented) & set(flags) and len(flags) == 8
    assert "overspill_one" not in flags.environment({})[XLA]
    text = flags.exports({})
    assert re.search(r"^# left out, unknown to jaxlib [\d.]+: xla_two=7$", text, re.MULTILINE)
    assert all(line.startswith("#") for line in text.splitlines() if "xla_two" in line)
    assert re.search(r"xla_two +left out +>=99 +unknown to jaxlib", str(flags))


def test_values_that_cannot_be_are_left_out_too(monkeypatch):
    bad = Flag("xla_gpu_memory_limit_slop_factor", "much", XLA, "", "")
    monkeypatch.setattr(rooms, "_CUDA", (*[flag for flag in rooms._CUDA if flag.name != bad.name], bad))
    flags = xla_flags("h200")
    assert flags.unknown == (bad,) and len(flags) == 7


def test_what_is_left_in_starts():
    """The flags as they are, read by the JAX at hand in a fresh process."""
    environment = {**os.environ, **xla_flags("gb200").environment({}), "JAX_PLATFORMS": "cpu"}
    code = "import jax; print(jax.numpy.arange(3).sum())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    broken = {**environment, XLA: f"{environment[XLA]} --xla_two=7"}
    assert subprocess.run([sys.executable, "-c", code], env=broken, capture_output=True).returncode != 0


def test_no_answer_is_no_knowledge(monkeypatch):
    monkeypatch.setitem(rooms._READ, XLA, "print('nothing is read')")
    rooms._check.cache_clear()
    try:
        flags = xla_flags("h200")
    finally:
        rooms._check.cache_clear()
    assert flags.checked == "" and len(flags) == 8 and not flags.unknown
    assert "not checked" in flags.exports({})


def test_it_is_asked_once(monkeypatch):
    rooms._check.cache_clear()
    xla_flags("h200")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("asked twice"))
    assert xla_flags("gb300").checked


@pytest.mark.parametrize("mine", ["--xla_unknown_of_mine=1", "oops", "--xla_dump_to='"])
def test_the_users_environment_has_no_say_in_the_check(mine, monkeypatch):
    """What is wrong with the user's own setting is theirs: our flags are known or not regardless."""
    monkeypatch.setenv(XLA, mine)
    rooms._check.cache_clear()
    try:
        assert not xla_flags("h200").unknown and xla_flags("h200").checked
    finally:
        rooms._check.cache_clear()


def test_what_the_user_set_stays():
    flags = xla_flags("h200")
    mine = f"--xla_dump_to='/tmp/a b' --{LIMIT}=4 --xla_gpu_autotune_level=0"
    base = {XLA: mine, POOL: "32", "HOME": "/root"}
    found = flags.environment(base)
    assert set(found) == {XLA, FRACTION, POOL} and found[POOL] == "32"
    assert found[XLA].endswith(mine) and found[XLA].count(LIMIT) == 1 and f"--{PIPELINED}=true" in found[XLA]
    assert [(flag.name, value) for flag, value in flags.kept(base)] == [(LIMIT, "4"), (POOL, "32")]
    text = flags.exports(base)
    assert f"# kept as it was: {LIMIT}=4, not 1" in text and f"# kept as it was: {POOL}=32, not 1396" in text
    assert flags.environment({**base, **found}) == found  # once more changes nothing


@pytest.mark.parametrize("mine", [f"--{PIPELINED}", f"--{PIPELINED}=true", f'--x="\\" --{LIMIT}=3" --{PIPELINED}'])
def test_the_same_setting_is_no_conflict(mine):
    flags = xla_flags("h200")
    assert flags.environment({XLA: mine})[XLA].count(PIPELINED) == 1
    assert f"--{LIMIT}=1" in flags.environment({XLA: mine})[XLA]
    assert not flags.kept({XLA: mine})


def test_flags_behind_a_mistake_are_read_nevertheless():
    """XLA reads to the first word that is no flag: ours come before it, and a flag behind it is no setting."""
    text = xla_flags("h200").environment({XLA: f"--xla_a=1 oops --{LIMIT}=4"})[XLA]
    assert text.index(PIPELINED) < text.index("oops") and f"--{LIMIT}=1" in text


def test_libtpu_says_false_with_no():
    flags = xla_flags("tpu-v5e")
    mine = "--noxla_tpu_enable_ag_backward_pipelining"
    assert flags.environment({LIBTPU: mine})[LIBTPU].count("xla_tpu_enable_ag_backward_pipelining") == 1
    ((flag, value),) = flags.kept({LIBTPU: mine})
    assert (flag.name, value) == ("xla_tpu_enable_ag_backward_pipelining", "false")


def test_a_file_of_flags_is_taken_in(tmp_path):
    flags = xla_flags("h200")
    (tmp_path / "flags").write_text(f"--xla_gpu_autotune_level=0\n--{LIMIT}=2\n")
    text = flags.environment({XLA: str(tmp_path / "flags")})[XLA]
    assert "--xla_gpu_autotune_level=0" in text and f"--{LIMIT}=1" not in text and PIPELINED in text
    with pytest.raises(ValueError, match="XLA_FLAGS='.*none' names a file of flags that can't be read"):
        flags.environment({XLA: str(tmp_path / "none")})


NASTY = """--xla_dump_to='a b' --xla_x="$(touch owned)`touch owned`;\\"!" --xla_y=it's\n--xla_z=*"""


@pytest.mark.parametrize("quoted", [True, False])
def test_a_shell_takes_it_as_it_is(quoted, tmp_path):
    """`eval "$(...)"`, and without the quotes: the same variables, and nothing of them is carried out."""
    flags, base = xla_flags("h200"), {XLA: NASTY}
    (tmp_path / "exports").write_text(flags.exports(base))
    call = '"$(cat exports)"' if quoted else "$(cat exports)"
    (tmp_path / "show.py").write_text(f"import os; print(os.environ['{XLA}']); print(os.environ['{POOL}'])")
    show = f"{shlex.quote(sys.executable)} show.py"
    done = subprocess.run(
        ["sh", "-euc", f"set -f; eval {call}; {show}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    text = "\n".join([flags.environment(base)[XLA], "1396", ""])
    assert done.stdout.split() == text.split()  # unquoted, line breaks in values are spaces
    assert not quoted or done.stdout == text
    assert not done.stderr and not (tmp_path / "owned").exists()


def test_comments_are_comments():
    base = {XLA: f"--{LIMIT}='4\ntouch owned'", POOL: "1\ntouch owned"}
    lines = xla_flags("h200").exports(base).splitlines()
    notes = lines[next(i for i, line in enumerate(lines) if line.startswith("#")) :]
    assert all(line.startswith("# ") for line in notes) and any("touch owned" in line for line in notes)


def test_fish():
    text = xla_flags("gb200").exports({XLA: "--xla_dump_to='a\\b'"}, shell="fish")
    assert text.startswith("set -gx XLA_FLAGS '--xla_gpu") and r"--xla_dump_to=\'a\\b\'';" in text.splitlines()[0]
    assert f"set -gx {POOL} '670';" in text
    with pytest.raises(ValueError, match="shell 'csh' is not one of sh, fish"):
        xla_flags("gb200").exports({}, shell="csh")


def test_how_much_the_host_may_pin(monkeypatch):
    assert values(xla_flags("h200"))[POOL] == "1396"
    assert values(xla_flags("h200", host_memory_gib=200))[POOL] == "200"
    monkeypatch.setattr(rooms, "_machine_bytes", lambda: 128 * 2**30)
    assert values(xla_flags("h200"))[POOL] == "96" and "this machine's 128" in xla_flags("h200")[-1].reason
    assert values(xla_flags("h200", host_memory_gib=200))[POOL] == "200"
    monkeypatch.setattr(rooms, "_machine_bytes", lambda: 4 * 2**40)
    assert values(xla_flags("h200"))[POOL] == "1396"
    with pytest.raises(ValueError, match="host_memory_gib is 0: at least 1 GiB"):
        xla_flags("h200", host_memory_gib=0)
    with pytest.raises(ValueError, match="tpu-v5p: only CUDA has a limit"):
        xla_flags("tpu-v5p", host_memory_gib=64)


def test_an_unknown_target_is_one_error():
    with pytest.raises(ValueError, match="there is no target 'gb20'; did you mean gb200"):
        xla_flags("gb20")


def test_after_the_start_it_is_too_late(monkeypatch):
    jax.devices()
    before = jax.config.jax_num_cpu_devices
    assert backends_started()
    monkeypatch.delenv(POOL, raising=False)
    flags = xla_flags("h200")
    with pytest.raises(RuntimeError, match=r"backends have started.*for h200 before the first array.*eval \"\$\(over"):
        flags.apply()
    assert POOL not in os.environ and jax.config.jax_num_cpu_devices == before
    for name, value in flags.environment().items():
        monkeypatch.setenv(name, value)
    flags.apply()  # was set in time, as far as anyone can tell


START = """
import os, sys
from overspill.policies.flags import Flags, backends_started, xla_flags
flags = xla_flags("gb200", host_memory_gib=670)
assert "jax" not in sys.modules
import jax
before = jax.config.jax_num_cpu_devices
assert not backends_started()
flags.apply()
assert not backends_started() and jax.config.jax_num_cpu_devices == before
assert os.environ["XLA_FLAGS"].count("slop_factor") == 1, os.environ["XLA_FLAGS"]
assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "670"
assert "--xla_force_host_platform_device_count=3" in os.environ["XLA_FLAGS"]
assert len(jax.devices("cpu")) == 3
assert backends_started()
flags.apply()
try:
    xla_flags("gb200", host_memory_gib=9).apply()  # kept: set already
    os.environ["XLA_FLAGS"] = ""
    flags.apply()
except RuntimeError as error:
    print(error)
"""


def test_apply_before_the_start():
    environment = {**os.environ, XLA: "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    environment.pop(POOL, None)
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("JAX's backends have started, and read XLA_FLAGS only then")


def test_as_json():
    found = xla_flags("h200").as_json()
    assert found["target"] == "h200" and found["unknown"] == [] and set(found["environment"]) == {XLA, FRACTION, POOL}
    assert found["flags"][0].keys() == {"name", "value", "variable", "reason", "versions"}
    assert isinstance(Flags(target("h200"), ()).as_json()["checked"], type(None))
