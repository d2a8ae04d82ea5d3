"""Wheel and editable install beside Hugging Face's package `kernels`, whose name our source folder kernels/ shares."""

import importlib.util
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("linearize", "linearize_kernels", "kernels")
DEMO = "smollm2-135m-cpu-demo"

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file() or importlib.util.find_spec("hatchling") is None,
    reason="needs the source tree and hatchling (make install)",
)


def call(*argv, cwd, fails=False):
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stdout[-1000:] + done.stderr[-3000:]
    return done


def pip(*argv, python=sys.executable):
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-q", *argv]
    return subprocess.run([str(a) for a in command], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def hugging_face_kernels(tmp_path_factory):
    """A folder with Hugging Face's `kernels` in it, installed from where pip finds packages."""
    folder = tmp_path_factory.mktemp("hf")
    command = ["install", "--no-deps", "--retries", "0", "--timeout", "20", "--target", folder]
    done = pip(*command, "kernels==0.17.2", "kernels-data==0.16.2")
    if done.returncode:
        pytest.skip(f"Hugging Face's kernels cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request, tmp_path_factory, hugging_face_kernels):
    """A fresh environment with our package in it and, seen from it, this environment's packages and theirs."""
    home = tmp_path_factory.mktemp(request.param)
    call(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).stdout.strip())
    here = Path(importlib.util.find_spec("torch").origin).parents[1]
    # Folders named in a .pth file are searched after the environment's own; .pth files in them are not read, so that
    # this environment's editable install stays out.
    (site / "others.pth").write_text(f"{hugging_face_kernels}\n{here}\n")
    target = ["-e", ROOT] if request.param == "editable" else [request.getfixturevalue("wheel")]
    done = pip("install", "--no-deps", "--no-build-isolation", "--no-index", *target, python=python)
    assert done.returncode == 0, done.stderr
    source = {"linearize": ROOT, "linearize_kernels": ROOT / "kernels"}
    expected = {name: site if request.param == "wheel" else source[name] for name in source}
    return request.param, python, home, expected | {"kernels": hugging_face_kernels}


FIND = (
    "import importlib.util, json\n"
    f"print(json.dumps({{name: importlib.util.find_spec(name).origin for name in {NAMES}}}))\n"
)


def check_origins(done, expected):
    found = json.loads(done.stdout)
    assert found == {name: str(expected[name] / name / "__init__.py") for name in NAMES}


def test_right_packages_from_anywhere(installed):
    kind, python, home, expected = installed
    script = home / "script.py"
    script.write_text(FIND)
    check_origins(call(python, "-c", FIND, cwd=home), expected)
    check_origins(call(python, script, cwd=home), expected)
    check_origins(call(python, script, cwd=ROOT), expected)
    if kind == "editable":  # with only the wheel, the checkout's linearize comes first here: see the layout's rules
        check_origins(call(python, "-c", FIND, cwd=ROOT), expected)


def test_imports_beside_hugging_face_kernels(installed):
    _, python, home, _ = installed
    code = "import linearize, linearize_kernels, kernels; kernels.get_kernel; from transformers import LlamaForCausalLM"
    call(python, "-c", code, cwd=home)


def test_command_and_recipes(installed):
    kind, python, home, expected = installed
    command = python.parent / "linearize"
    for cwd in (home, ROOT):
        assert DEMO in json.loads(call(command, "recipes", "ls", "--json", cwd=cwd).stdout)["recipes"]
    code = "import sys; sys.argv = ['linearize']; from linearize.recipe import recipes_dir; print(recipes_dir())"
    where = Path(call(python, "-c", code, cwd=home).stdout.strip())
    assert where == (ROOT / "recipes" if kind == "editable" else expected["linearize"] / "linearize" / "recipes")
    assert (where / DEMO / "recipe.yaml").read_text() == (ROOT / "recipes" / DEMO / "recipe.yaml").read_text()


def test_wheel_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"linearize", "linearize_kernels"}
    assert f"linearize/recipes/{DEMO}/recipe.yaml" in names
    for package, source in (("linearize", ROOT), ("linearize_kernels", ROOT / "kernels")):
        sources = {p for p in (source / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        assert {str(p.relative_to(source)) for p in sources} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_source_archive_contents(tmp_path):
    """Only what belongs to the project: without a list, everything that git does not ignore would go in."""
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        top = {name.split("/")[1] for name in archive.getnames()}
    needed = {"linearize", "kernels", "recipes", "docs", "tests", "LICENSE", "pyproject.toml"}
    assert needed <= top <= needed | {"Makefile", "constraints.txt", "README.md", "PKG-INFO", ".gitignore"}


def test_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_constraints_satisfy_the_declared_ranges():
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines if line[0] != "#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("python, words", [("old", "3.11 or newer (got Python 3.9.1)"), ("none", "no program")])
def test_make_needs_a_new_python(tmp_path, python, words):
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = call("make", "install", f"PYTHON={tmp_path / python}", f"VENV={tmp_path / 'venv'}", cwd=ROOT, fails=True)
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "venv").exists()
