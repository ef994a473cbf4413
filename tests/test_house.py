"""The shape of the project: which floor imports which, what is packaged, what importing costs."""

import ast
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = {"policies": set(), "layers": {"policies"}, "zoo": {"policies", "layers"}}


def imports(path):
    """(level, module) of every import in a file, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_one_way(floor):
    for path in (ROOT / floor).glob("*.py"):
        for level, module in imports(path):
            assert module.split(".")[0] != "overspill", f"{path.name} imports {module}: relative imports only"
            if level == 2:
                other = module.split(".")[0]
                if other == "":  # the package's root: its version
                    continue
                assert other in FLOORS[floor], f"{floor}/{path.name} imports {module}"
                if floor == "layers":
                    assert module in ("policies.activation", "policies.axes"), f"layers/{path.name} imports {module}"


def test_files_stay_readable():
    for floor in FLOORS:
        for path in (ROOT / floor).glob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 420, f"{floor}/{path.name} has {lines} lines: what wants a file of its own?"


def test_one_layer_imports_light():
    code = (
        "import sys; from overspill.layers.mlp import MLP; import overspill.layers; overspill.layers.MLP;"
        "heavy = {'scipy.optimize', 'matplotlib', 'orbax', 'typer', 'overspill.zoo'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["layers", "policies", "zoo"])
def test_every_public_name_loads(package):
    module = __import__(f"overspill.{package}", fromlist=["x"])
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{package}.{name} has no docstring"
        assert name in dir(module)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name


def test_wheel_holds_what_git_holds(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    source = tmp_path / "source"
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = set()
    for name in tracked:
        floor, _, rest = name.partition("/")
        if name.startswith("zoo/_root/"):
            expected.add("overspill/" + name.removeprefix("zoo/_root/"))
        elif floor in FLOORS and rest.endswith(".py"):
            expected.add(f"overspill/{name}")
    assert held == expected
