"""One set of modules from a checkout, an editable install and a wheel; the entry points; the types of the wheel."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROBE = """
import gemma_npu_compile.passes.pipeline, gemma_npu_compile.graphs.host, gemma_npu_compile, sys
from torch._dynamo.backends.registry import lookup_backend
import gemma_npu_compile.backend
assert lookup_backend("gemma_npu") is gemma_npu_compile.backend.backend
assert "passes" not in sys.modules and "graphs" not in sys.modules and "transformers" not in sys.modules
print(gemma_npu_compile.passes.__file__)
"""
USE = """
import torch
from gemma_npu_compile.ops import store_kv
def write(key, cache_k, cache_v, slots):
    store_kv(key, key, cache_k, cache_v, slots)
    return cache_k.sum()
cache = torch.zeros(2, 16, 1, 2), torch.zeros(2, 16, 1, 2)
for tensor in cache:
    torch._dynamo.mark_static_address(tensor, guard=False)
run = torch.compile(write, backend="gemma_npu", fullgraph=True)
with torch.no_grad():
    print(float(run(torch.ones(3, 1, 2), *cache, torch.tensor([1, 2, 17]))))
"""


def python(code: str, cwd: Path, executable: str = sys.executable) -> str:
    done = subprocess.run([executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_checkout_and_editable_install_import_the_same_modules(tmp_path):
    """From the repository root the path rule works, elsewhere the editable install; both without transformers."""
    assert Path(python(PROBE, ROOT)) == ROOT / "passes" / "__init__.py"
    assert Path(python(PROBE, tmp_path)) == ROOT / "passes" / "__init__.py"


def test_a_bare_import_is_forbidden_by_lint(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text('"""Bad."""\n\nimport passes\nfrom graphs import host\n\nprint(passes, host)\n')
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("TID251") == 2


@pytest.fixture(scope="module")
def wheel_python(tmp_path_factory) -> tuple[Path, str]:
    """The wheel, and a fresh environment in which only it and this environment's dependencies exist."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    environment = out / "venv"
    venv.create(environment, with_pip=True)
    executable = str(environment / "bin" / "python")
    install = [executable, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    site = next((environment / "lib").glob("python*")) / "site-packages"
    # Plain path entries: the editable hook of this environment is not processed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return wheel, executable


@pytest.mark.slow
def test_the_wheel_works_from_another_directory(wheel_python, tmp_path):
    _, executable = wheel_python
    found = Path(python(PROBE, tmp_path, executable))
    assert ROOT not in found.parents
    assert found.parts[-3:] == ("gemma_npu_compile", "passes", "__init__.py")
    assert python(USE, tmp_path, executable) == "6.0"
    console = Path(executable).with_name("gemma-npu")
    version = subprocess.run([console, "--version"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert version.stdout.startswith("gemma-npu 0.")


@pytest.mark.slow
def test_what_the_wheel_holds(wheel_python):
    wheel, _ = wheel_python
    names = zipfile.ZipFile(wheel).namelist()
    assert {"gemma_npu_compile/py.typed", "gemma_npu_compile/tiny_pair/target/model.safetensors"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"gemma_npu_compile"}
    assert any(name.endswith("LICENSE") for name in names)
    size = sum(i.file_size for i in zipfile.ZipFile(wheel).infolist() if "tiny_pair" in i.filename)
    assert size <= 12 * 2**20


@pytest.mark.slow
def test_the_wheel_type_checks(wheel_python, tmp_path):
    _, executable = wheel_python
    config = str(ROOT / "pyproject.toml")
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--python-executable", executable]
    done = subprocess.run(
        [*command, "-p", "gemma_npu_compile"], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout


def test_no_module_hides_a_public_name(tmp_path):
    """Importing a submodule binds its name in the package: it must never be a name users call."""
    code = """
import gemma_npu_compile as gnc, importlib, pkgutil, types
for module in pkgutil.walk_packages(gnc.__path__[:1], "gemma_npu_compile."):
    if "tiny_pair" not in module.name:
        importlib.import_module(module.name)
print([n for n in gnc.__all__ if isinstance(getattr(gnc, n), types.ModuleType)], len(gnc.__all__))
"""
    assert python(code, tmp_path).startswith("[] ")
