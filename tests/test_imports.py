"""Imports point one way (CONTRIBUTING.md), and `import securefl` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module may import modules of its own layer or below; client and server are apart from each other besides.
LAYERS = [
    {"errors", "files"},
    {
        "release",
        "messages",
        "config",
        "crosslm_terms",
        "data_terms",
        "privacy_terms",
        "protection_terms",
        "result",
    },
    {
        "privacy",
        "accountants",
        "centroid_privacy",
        "distributed_noise",
        "data",
        "_tables",
        "_builtin",
        "models",
        "slm",
        "_model_files",
        "_llm_place",
        "_adapter",
        "scoring",
        "crypto",
        "gaussian",
        "receipt",
        "transport",
    },
    {"methods", "gradients", "batches", "synthetic_quality"},
    {
        "training",
        "dp_sgd",
        "dp_terms",
        "account",
        "ledger",
        "_ledger_lines",
        "_ledger_chain",
        "_ledger_files",
        "ledger_copies",
        "policy",
    },
    {"local", "agreement", "state", "exchange", "announcement"},
    {"relayed", "simulated_policy", "outlook", "participation"},
    {"steps", "summation"},
    {"opening", "model_card", "contribution"},
    {
        "trained",
        "_lower_layers",
        "_llm_weights",
        "_language_model",
        "_llm_training",
        "_vllm",
        "task_model",
        "crosslm_worker",
        "client",
        "server",
    },
    {"silo", "approval", "lanes", "crosslm_state"},
    {"workbench", "feasibility", "recording", "verification", "inspection", "report"},
    {"simulated_lanes", "simulated_rounds"},
    {"simulation"},
    {"demo", "console"},
    {"commands"},
    {"cli"},
]
EXCEPTION = ("securefl/cli.py", "attacks")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "securefl" and len(parts) > 1 else None


def _layer(room: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if room in layer)


MODULES = sorted((ROOT / "securefl").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(ROOT / "securefl")
    room = relative.parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    known = set().union(*LAYERS)
    assert room in known, f"{room}: give the new room its layer in this test"
    for name in _imports(path):
        target = _room(name)
        if target in known:
            assert _layer(target) <= _layer(room), f"{path} imports {name} from above"
        if name.split(".")[0] == "attacks":
            assert (str(path.relative_to(ROOT)), "attacks") == EXCEPTION


def test_client_and_server_do_not_know_each_other() -> None:
    assert not any(name.startswith("securefl.server") for name in _imports(ROOT / "securefl/client.py"))
    assert not any(name.startswith("securefl.client") for name in _imports(ROOT / "securefl/server.py"))


def test_methods_are_pure_of_keys_and_files() -> None:
    for path in (ROOT / "securefl/methods").glob("*.py"):
        rooms = {_room(name) for name in _imports(path)}
        assert not rooms & {"crypto", "ledger", "policy", "files", "client", "server", "transport"}


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, securefl; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]
