"""Save, load in a new process and continue is never having stopped, bit for bit on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_seeded, mlp
from optim_models import CE, net, same, snapshot, train_numbered
from torch import nn

import natgrad as ng
from natgrad.optim.checkpoint import pack_tree, unpack_tree

HERE = Path(__file__).parent


def dropout_net() -> nn.Module:
    """Masks from the global generator, statistics in buffers."""
    return build_seeded(
        lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))
    )


def make(name: str) -> tuple[nn.Module, ng.NaturalGradient]:
    """A model and an optimizer whose next step depends on its past."""
    model = dropout_net() if name == "dropout" else net()
    builders = {
        "hessian_free": lambda: ng.hessian_free(model, CE),
        "dropout": lambda: ng.hessian_free(model, CE),
        "momentum": lambda: ng.NaturalGradient(model, ng.fisher(model, CE), lr=0.1, damping=0.1, rule=ng.Momentum()),
        "averaged": lambda: ng.NaturalGradient(
            model, ng.fisher(model, CE), lr=0.1, damping=ng.Relative(0.1), structure=ng.Dense(0.9)
        ),
        "sampled": lambda: ng.NaturalGradient(
            model, ng.sampled_fisher(model, CE, samples=2), lr=0.1, damping=0.1, rule=ng.TrustRegion(0.01)
        ),
        "groups": lambda: ng.NaturalGradient(
            model,
            ng.fisher(model, CE),
            lr=0.1,
            params=[
                {"params": model[0].parameters(), "lr": 0.2, "weight_decay": 0.1},
                {"params": model[2].parameters()},
            ],
        ),
    }
    return model, builders[name]()


NAMES = ["hessian_free", "dropout", "momentum", "averaged", "sampled", "groups"]


def save(path: Path, model: nn.Module, opt: ng.NaturalGradient) -> None:
    """What a user would save."""
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "random": torch.get_rng_state()}, path)


def resume(name: str, path: Path) -> tuple[nn.Module, ng.NaturalGradient]:
    """What a user would write to go on, in another process too."""
    model, opt = make(name)
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["random"])
    return model, opt


def resume_all(folder: str, threads: int) -> None:
    """The other process: three more steps of everything."""
    torch.set_num_threads(threads)  # bit for bit is for as many as the first process had
    torch.manual_seed(12345)  # another past than the first process had
    for name in NAMES:
        model, opt = resume(name, Path(folder) / f"{name}.pt")
        train_numbered(model, opt, range(4, 7))
        save(Path(folder) / f"{name}.resumed.pt", model, opt)


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """For every name: (never having stopped, saved after four steps and continued in a new process)."""
    folder, straight = tmp_path_factory.mktemp("checkpoints"), {}
    for name in NAMES:
        torch.manual_seed(1)
        model, opt = make(name)
        train_numbered(model, opt, range(4))
        save(folder / f"{name}.pt", model, opt)
        train_numbered(model, opt, range(4, 7))
        save(folder / f"{name}.straight.pt", model, opt)
        straight[name] = torch.load(folder / f"{name}.straight.pt", weights_only=True)
    paths = [str(HERE), *sys.path]
    call = f"t.resume_all({str(folder)!r}, {torch.get_num_threads()})"
    program = f"import sys; sys.path[:0] = {paths!r}; import test_checkpoints as t; {call}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    return {name: (straight[name], torch.load(folder / f"{name}.resumed.pt", weights_only=True)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_save_load_in_a_new_process_and_continue_is_never_having_stopped(name: str, resumed_runs: dict) -> None:
    straight, continued = resumed_runs[name]
    assert same(continued["model"], straight["model"])
    assert same(continued["opt"], straight["opt"])
    assert same(continued["random"], straight["random"])


FOREIGN = {
    "SGD": lambda: torch.optim.SGD(net().parameters(), lr=0.1).state_dict(),
    "Adam": lambda: torch.optim.Adam(net().parameters()).state_dict(),
    "a model": lambda: net().state_dict(),
    "nothing": dict,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_state_dict_is_refused(kind: str) -> None:
    model, opt = make("momentum")
    train_numbered(model, opt, range(2))
    before = snapshot(opt)
    with pytest.raises(ValueError, match=r"state_dict .*was not saved by natgrad.NaturalGradient"):
        opt.load_state_dict(FOREIGN[kind]())
    assert same(snapshot(opt), before)


def other_groups() -> dict[str, Any]:
    return make("groups")[1].state_dict()


def other_model() -> dict[str, Any]:
    model = mlp(3, 4, 4, 3)
    return ng.NaturalGradient(model, ng.fisher(model, CE)).state_dict()


@pytest.mark.parametrize("build", [other_groups, other_model])
def test_a_state_dict_of_other_groups_is_refused(build: Any) -> None:
    model, opt = make("sampled")
    train_numbered(model, opt, range(2))
    before = snapshot(opt)
    with pytest.raises(ValueError, match="param"):
        opt.load_state_dict(build())
    assert same(snapshot(opt), before)


# nested values as a text and tensors: what comes back is what went in, to the bit and to the type


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
TREE: dict[str, Any] = {
    "numbers": [1, 0.1, -0.0, math.inf, 5e-324, 2**70, True, None],
    "words": ("a.b", "", 'quo"te'),
    "nested": {"empty": {}, 3: [], "pair": ((), [{"deep": torch.arange(6).reshape(2, 3)}])},
    "tensors": {str(dtype): torch.tensor([[0, 1], [1, 1]], dtype=dtype) for dtype in DTYPES},
    "scalars": [torch.tensor(2.5, dtype=dtype) for dtype in DTYPES],
    "none of it": [torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)],
    "strided": torch.arange(12.0).reshape(3, 4).T[1:, ::2],
}


def types(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: types(value) for key, value in tree.items()}
    return [type(tree), *map(types, tree)] if isinstance(tree, (list, tuple)) else type(tree)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tree_comes_back_from_tensors_beside_the_text_and_from_within_it(device: str):
    packed = pack_tree(TREE, torch.device(device))
    assert (len(packed) > 2) == (device == "cpu")
    for form in (packed, list(packed), (*packed, torch.ones(3))):  # torch makes lists of tuples, and may append
        found = unpack_tree(form)
        assert same(found, TREE)
        assert types(found) == types(TREE)
        assert found["strided"].shape == TREE["strided"].shape
        assert math.copysign(1, found["numbers"][2]) == -1


@pytest.mark.parametrize("lost", ["a tensor", "the text", "a part of the text"])
def test_what_was_lost_is_an_error(lost: str):
    packed = pack_tree(TREE, torch.device("cpu"))
    cut = {"a tensor": packed[:-1], "the text": packed[1:], "a part of the text": (packed[0][:-9], *packed[1:])}[lost]
    with pytest.raises(ValueError, match="packed state in state_dict cannot be read"):
        unpack_tree(cut)
    json.loads(packed[0])
