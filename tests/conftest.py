"""Tests compile hundreds of small programs and run each once: compile fast, run slow. XLA's own passes stay on."""

import os

_FAST_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
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
