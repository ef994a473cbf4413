"""Tests compile hundreds of small programs and run each once: compile fast, run slow. XLA's own passes stay on."""

import os

_FAST_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# All of them run on CPUs, of which there can be as many as a test wants.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What the environment says comes last, and wins.
os.environ["XLA_FLAGS"] = f"{_FAST_TO_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax  # noqa: E402  after the flags
import pytest  # noqa: E402

# For the tests of meshes. All others use the first device, and processes started by tests have one.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def text(tmp_path):
    """A folder of small documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * 20)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Compilations of the tests are kept apart from the user's."""
    before = os.environ.get("OVERSPILL_CACHE")
    os.environ["OVERSPILL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("OVERSPILL_CACHE")
    if before is not None:
        os.environ["OVERSPILL_CACHE"] = before


def _target(name, platform):
    from overspill.policies.ahead import require_compiler

    try:
        require_compiler(platform)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="session")
def gpu():
    """A GPU to compile for; skips where its compiler isn't installed."""
    return _target("h200", "cuda")


@pytest.fixture(scope="session")
def tpu():
    """A TPU to compile for; skips where its compiler isn't installed."""
    return _target("tpu-v5p", "tpu")
