"""The layout: import names, installed files, one-way imports, and what committed text may name."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "specdec": "specdec",
    "specdec.models": "models",
    "specdec.kernels": "kernels",
    "specdec.experiments": "experiments",
    "specdec.conf": "conf",
}
# The modules that hold one family each; a config names them, `specdec/` never does.
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek", "eagle", "eagle3", "mtp")


def run(code: str, cwd: Path, *python_path: Path) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, python_path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("inside", [True, False], ids=["root", "elsewhere"])
def test_imports_map_to_the_folders(inside, tmp_path):
    code = "import importlib\n" + "\n".join(
        f"print(importlib.import_module({name!r}).__path__[0])" for name in FOLDERS
    )
    found = run(code, ROOT if inside else tmp_path).split()
    assert found == [str(ROOT / folder) for folder in FOLDERS.values()]


def test_public_kernels_package_is_not_hidden(tmp_path):
    """From the root, transformers gets the installed `kernels` and this project keeps its own.

    `python -c` puts the working directory first on `sys.path`, as a script at the root would.
    """
    from transformers.utils.import_utils import KERNELS_MIN_VERSION as version

    assert not (ROOT / "kernels" / "__init__.py").exists(), "see specdec/__init__.py for the reason"
    stub = tmp_path / "kernels"
    stub.mkdir()
    (stub / "__init__.py").write_text(
        f"__version__ = {version!r}\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    return lambda *args, **kwargs: lambda decorated: decorated\n"
    )
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    code = """
import sys
from transformers.models.llama import modeling_llama
from transformers.utils import is_kernels_available
import kernels
import specdec.kernels
assert sys.path[0] == ""
assert is_kernels_available()
assert sys.modules["transformers.integrations.hub_kernels"].LayerRepository
print(kernels.__file__, specdec.kernels.__path__[0], modeling_llama.LlamaForCausalLM.__name__)
"""
    out = run(code, ROOT, tmp_path).split()
    assert out == [str(stub / "__init__.py"), str(ROOT / "kernels"), "LlamaForCausalLM"]


def test_wheel_holds_every_folder_and_the_data(tmp_path):
    """A new folder of code needs no edit of the build files."""
    tree = tmp_path / "tree"
    for folder in FOLDERS.values():
        shutil.copytree(
            ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "pretrained")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    added = (
        "kernels/new_op/reference.py",
        "specdec/new_stage/rule.py",
        "specdec/prompts/new.jsonl",
        "models/pretrained/new_head/model.safetensors",
        "conf/new_group/nested/choice.yaml",
    )
    for name in added:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    pip_wheel += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tree)]
    subprocess.run(pip_wheel, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("specdec-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {
        package.replace(".", "/") + "/" + path.relative_to(tree / folder).as_posix()
        for package, folder in FOLDERS.items()
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".jsonl", ".safetensors")
    }
    assert packed >= {
        "specdec/kernels/new_op/reference.py",
        "specdec/new_stage/rule.py",
        "specdec/prompts/new.jsonl",
        "specdec/models/pretrained/new_head/model.safetensors",
        "specdec/conf/new_group/nested/choice.yaml",
    }


def imported(path: Path, module: str) -> set[str]:
    """Absolute dotted names that the file at `path`, importable as `module`, imports or names.

    `from a import b` counts as `a.b`; a string that is nothing but a dotted name under specdec
    counts too, since it can only be an import in disguise.
    """
    names = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"specdec(\.\w+)+", str(node.value)):
            names.add(node.value)
    return names


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(root: Path) -> list[str]:
    """Imports below `root` that go against entry scripts -> experiments -> specdec -> models ->
    kernels. `specdec.errors` is a leaf that every layer above kernels may raise from."""
    bad = []
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            module = ".".join((package, *(part for part in inner if part != "__init__")))
            for name in sorted(imported(path, module)):
                wrong = under(name, "kernels", "models", "experiments", "conf")
                if package == "specdec.kernels":
                    wrong |= under(name, "specdec") and not under(name, "specdec.kernels")
                elif package == "specdec.models":
                    allowed = ("specdec.models", "specdec.kernels", "specdec.errors")
                    wrong |= under(name, "specdec") and not under(name, *allowed)
                elif package == "specdec":
                    concrete = (f"specdec.models.{family}" for family in FAMILIES)
                    wrong |= under(name, "specdec.experiments", *concrete)
                if wrong:
                    bad.append(f"{path.relative_to(root)}: {name}")
    return bad


def test_imports_go_one_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/op/reference.py", "from specdec.state import State"),
        ("kernels/op/reference.py", "import specdec.models.layers"),
        ("kernels/op/reference.py", "from ...models import layers"),
        ("kernels/op/kernel.py", "from kernels.op import reference"),
        ("models/llama.py", "from specdec import verify"),
        ("models/llama.py", "def f():\n    from specdec.propose.chain import propose"),
        ("specdec/build.py", "from specdec.models import llama"),
        ("specdec/build.py", "from specdec.models.llama import forward"),
        ("specdec/build.py", "from .models.eagle import forward"),
        ("specdec/build.py", "load('specdec.models.qwen3.forward')"),
        ("specdec/engine.py", "import specdec.experiments.speed"),
        ("experiments/speed.py", "from models import llama"),
    ],
)
def test_the_import_scan_finds(file, line, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/op/kernel.py", "import torch\nfrom .reference import op"),
        ("models/llama.py", "from specdec.kernels.op.reference import op\nimport transformers"),
        ("models/llama.py", "from specdec.errors import CheckpointError"),
        ("specdec/engine.py", "from specdec.models.load import load\nfrom . import step"),
        ("experiments/speed.py", "from specdec.models.llama import forward\nimport specdec.engine"),
    ],
)
def test_the_import_scan_allows(file, line, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path) == []


# Written with classes of one letter, so that this file does not match itself.
MACHINE = re.compile(
    r"/(?:wor[k]/|roo[t]/|opt/pyp[i]|opt/wheel[s]|tm[p]/|hom[e]/\w)"
    r"|pyp[i]\.org|pythonhoste[d]\.org|npmj[s]\.org|debia[n]\.org|download\.pytorc[h]\.org"
)


def test_committed_text_names_no_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" in data:
            continue  # binary
        for match in MACHINE.finditer(data.decode("utf-8", "replace")):
            found.append(f"{name}: {match[0]}")
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["cd /wor" + "k/main", "/tm" + "p/run", "https://pyp" + "i.org/simple", "/opt/whee" + "ls"],
)
def test_the_machine_scan_finds(text):
    assert MACHINE.search(text)


def test_the_machine_scan_allows_ordinary_text():
    assert not MACHINE.search("artwork/a, src/root, https://www.apache.org/licenses, $HOME/x")
