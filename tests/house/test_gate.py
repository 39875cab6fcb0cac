"""A test that fails leaves the others as they were, and the gate runs where a user does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optim_models import Interrupt
from torch_settings import SETTINGS, read_torch_settings, write_torch_settings

import natgrad as ng

GATE = Path(__file__).parents[2] / ".ci" / "run"

CHANGES: dict[str, Callable[[], object]] = {
    "default device": lambda: torch.set_default_device("meta"),
    "function modes": lambda: torch.device("meta").__enter__(),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "gradients enabled": lambda: torch.no_grad().__enter__(),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "fused attention": lambda: torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled()),
    "open autocasts": torch.autocast_increment_nesting,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_test_changed_is_put_back(name: str):
    before = read_torch_settings()
    CHANGES[name]()
    assert read_torch_settings()[name] != before[name]
    write_torch_settings(before)
    assert read_torch_settings() == before
    assert torch.ones(2, requires_grad=True).add(1).requires_grad


def test_a_line_of_natgrad_is_one_of_its_own_files():
    """Wherever it lies: a folder of its name may hold torch too."""
    with Interrupt() as interrupt:
        torch.nn.Linear(2, 3)(torch.ones(2)).sum().backward()  # many lines, of torch and of this folder
    assert interrupt.seen == 0
    with Interrupt() as interrupt:
        ng.CG()
    assert interrupt.seen > 0


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("bash") is None, reason="needs make and bash")
@pytest.mark.parametrize("folder", ["natgrad", "checkout", "a b"])
def test_the_gate_runs_in_a_folder_named_natgrad_without_an_environment_from_elsewhere(folder: str, tmp_path: Path):
    root, away = tmp_path / folder, tmp_path / "away"
    for path in (root / ".ci", root / ".venv", root / "runs", away):
        path.mkdir(parents=True)
    shutil.copy(GATE, root / ".ci" / "run")
    (root / "failing").touch()
    (root / "Makefile").write_text("check docs:\n\t@echo $@ '$(CURDIR)'\n\t@ls -A\ntest:\n\t@rm failing\n")

    def run_gate() -> subprocess.CompletedProcess[str]:
        command, environment = ["bash", str(root / ".ci" / "run")], os.environ | {"TMPDIR": str(away)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    gate = run_gate()
    assert gate.returncode == 0, gate.stderr
    places = [line.split(" ", 1) for line in gate.stdout.splitlines() if line.startswith(("check ", "docs "))]
    assert [target for target, _ in places] == ["check", "docs"]
    assert {Path(place).name for _, place in places} == {"natgrad"}
    here = folder == "natgrad"
    assert (".venv" in gate.stdout.split()) is here
    assert (root / "failing").exists() is not here
    assert not list(away.iterdir())  # a copy goes
    (root / "failing").unlink(missing_ok=True)
    assert run_gate().returncode != 0
    assert not list(away.iterdir())
