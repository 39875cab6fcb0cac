"""Checkpoints that go through `torch.distributed.checkpoint`, older ones, and those that lost a part on their way."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from optim_models import CE, X, Y, flat, net, same, snapshot, train_numbered
from torch import distributed, nn

import natgrad as ng
from natgrad.optim.checkpoint import name_positions

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed")
if distributed.is_available():
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

Optimizer = Any
EXACT = ng.ExactLabels()


def group_parameters(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model[2].parameters(), "lr": 0.2}, {"params": model[0].parameters()}]  # type: ignore[index]


BUILDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "kfac": lambda m: ng.kfac(m, CE, lr=0.3, update_every=2, invert_every=3),
    "no momentum": lambda m: ng.kfac(m, CE, lr=0.3, momentum=0.0, estimate=EXACT),
    "two groups": lambda m: ng.kfac(m, CE, lr=0.3, params=group_parameters(m)),
    "judged": lambda m: ng.kfac(m, CE, damping=ng.LevenbergMarquardt(0.1, per="block")),
    "ekfac": lambda m: ng.ekfac(m, CE, lr=0.3),
    "diagonal": lambda m: ng.diagonal(m, CE, lr=0.3),
    "unitwise": lambda m: ng.unitwise(m, CE, lr=0.3),
    "online_ng": lambda m: ng.online_ng(m, CE, lr=0.3),
    "tonga": lambda m: ng.tonga(m, CE, lr=0.3),
    "hessian_free": lambda m: ng.hessian_free(m, CE),
    "preconditioned": lambda m: ng.hessian_free(m, CE, preconditioner=ng.DiagonalPreconditioner()),
    "momentum": lambda m: ng.NaturalGradient(m, ng.fisher(m, CE), lr=0.1, damping=0.1, rule=ng.Momentum()),
    "averaged": lambda m: ng.NaturalGradient(m, ng.fisher(m, CE), lr=0.1, damping=0.1, structure=ng.Dense(0.9)),
    "sampled": lambda m: ng.NaturalGradient(m, ng.sampled_fisher(m, CE), lr=0.1, damping=0.1),
}


def train_net(build: str) -> tuple[nn.Module, Optimizer]:
    model = net()
    opt = BUILDS[build](model)
    train_numbered(model, opt, range(5))
    return model, opt


def fresh(build: str) -> tuple[nn.Module, Optimizer]:
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    return model, BUILDS[build](model)


def in_memory(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    names, state = copy.deepcopy(get_state_dict(model, opt))
    set_state_dict(twin, other, model_state_dict=names, optim_state_dict=state)


def whole(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    names, state = copy.deepcopy(get_state_dict(model, opt, options=options))
    set_state_dict(twin, other, model_state_dict=names, optim_state_dict=state)


def in_a_file(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    torch.save(get_state_dict(model, opt), folder / "file")
    names, state = torch.load(folder / "file", weights_only=True)
    set_state_dict(twin, other, model_state_dict=names, optim_state_dict=state)


def in_a_folder(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    checkpoint.save(dict(zip("mo", get_state_dict(model, opt), strict=True)), checkpoint_id=folder / "named")
    found = dict(zip("mo", get_state_dict(twin, other), strict=True))
    checkpoint.load(found, checkpoint_id=folder / "named")
    set_state_dict(twin, other, model_state_dict=found["m"], optim_state_dict=found["o"])


def in_a_plain_folder(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    checkpoint.save({"m": model.state_dict(), "o": opt.state_dict()}, checkpoint_id=folder / "plain")
    found = {"m": twin.state_dict(), "o": other.state_dict()}
    checkpoint.load(found, checkpoint_id=folder / "plain")
    twin.load_state_dict(found["m"])
    other.load_state_dict(found["o"])


def as_it_was_written_once(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(older(opt))


def older(opt: Optimizer) -> dict[str, Any]:
    """The state as it was saved before it survived `get_state_dict`."""
    state = copy.deepcopy(opt.state_dict())
    extra = {key: value for key, value in state["natgrad"].items() if key not in ("shapes", "structure", "format")}
    groups = [{key: value for key, value in group.items() if key != "natgrad"} for group in state["param_groups"]]
    plain = copy.deepcopy(opt._by_parameter())
    kept = {i: plain[name] for i, (name, _) in enumerate(name_positions(opt)) if plain.get(name)}
    return {"state": kept, "param_groups": groups, "natgrad": extra}


def first_format(opt: Optimizer) -> dict[str, Any]:
    """The state as format 1 had it: numbers and words by parameter, and one mapping in a tuple."""
    state = older(opt)
    names = [name for name, _ in name_positions(opt)]
    state["natgrad"] = copy.deepcopy(opt.state_dict()["natgrad"]) | {"format": 1}
    whole = {"extra": state["natgrad"], "state": {names[i]: numbers for i, numbers in state["state"].items()}}
    state["param_groups"][0]["natgrad"] = (copy.deepcopy(whole),)
    return state


def in_a_state_of_format_1(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(first_format(opt))


CASES = [(build, way) for build in BUILDS for way in (in_a_folder, in_a_plain_folder)]
CASES += [(build, way) for build in ("kfac", "momentum") for way in (in_memory, whole, in_a_file)]
CASES += [(build, as_it_was_written_once) for build in ("two groups", "unitwise", "preconditioned", "sampled")]
CASES += [(build, in_a_state_of_format_1) for build in ("two groups", "online_ng", "momentum")]
OPTION = "flatten_optimizer_state_dict"
OPTIONS = [dict(zip(("full_state_dict", "cpu_offload", OPTION), on, strict=True))
           for on in itertools.product((False, True), repeat=3)]  # fmt: skip


def hand_over(model: nn.Module, opts: Any, twin: nn.Module, others: Any, options: dict[str, bool]) -> None:
    """Saves with these options and loads with them; torch loads what is flattened and full with the first alone."""
    names, state = copy.deepcopy(get_state_dict(model, opts, options=StateDictOptions(**options)))
    chosen = StateDictOptions(**(options | ({"full_state_dict": False} if options[OPTION] else {})))
    set_state_dict(twin, others, model_state_dict=names, optim_state_dict=state, options=chosen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "way"), CASES)
def test_a_fresh_optimizer_goes_on_bit_for_bit(build: str, way: Callable[..., None], tmp_path: Path):
    model, opt = train_net(build)
    twin, other = fresh(build)
    way(model, opt, twin, other, tmp_path)
    before = copy.deepcopy(opt.state_dict())
    assert same(other.state_dict(), before)
    train_numbered(model, opt, range(5, 9))
    train_numbered(twin, other, range(5, 9))
    assert torch.equal(flat(model), flat(twin))
    assert same(opt.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", ["kfac", "two groups", "online_ng", "preconditioned", "averaged", "sampled"])
def test_every_choice_of_options_goes_on_bit_for_bit(build: str):
    model, opt = train_net(build)
    expected = copy.deepcopy(opt.state_dict())
    pairs = [(train_net if k % 2 else fresh)(build) for k in range(len(OPTIONS))]
    for (twin, other), options in zip(pairs, OPTIONS, strict=True):
        hand_over(model, opt, twin, other, options)
        assert same(other.state_dict(), expected), options
    train_numbered(model, opt, range(5, 7))
    for twin, other in (pairs[0], pairs[-2], pairs[-1]):
        train_numbered(twin, other, range(5, 7))
        assert torch.equal(flat(model), flat(twin))
        assert same(opt.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("build", ["kfac", "momentum"])
def test_a_state_of_no_step_is_a_state(build: str, options: dict[str, bool]):
    (model, opt), (twin, other) = fresh(build), train_net(build)
    hand_over(model, opt, twin, other, options)
    assert same(other.state_dict(), opt.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS)
def test_a_part_beside_another_optimizer_goes_on_bit_for_bit(options: dict[str, bool]):
    runs = []
    for _ in range(2):
        model = net()
        opts = (ng.kfac(model, CE, params=model[0].parameters()), torch.optim.Adam(model[2].parameters()))
        runs.append((model, opts))
    (model, opts), (twin, others) = runs

    def train_both(model: nn.Module, opts: Any) -> None:
        for _ in range(3):
            model.zero_grad()
            opts[0].loss(model(X), Y).backward()
            for opt in opts:
                opt.step()

    train_both(model, opts)
    hand_over(model, opts, twin, others, options)
    train_both(model, opts)
    train_both(twin, others)
    assert torch.equal(flat(model), flat(twin))


def paths(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every entry of nested mappings and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in pairs:
        found += [(*above, key), *paths(value, (*above, key))]
    return found


def parent(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def refuses(opt: Optimizer, state: Any) -> None:
    before = snapshot(opt)
    with pytest.raises(ValueError, match="state_dict"):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("build", ["kfac", "ekfac", "preconditioned", "averaged"])
def test_a_state_that_lost_any_part_is_refused_and_nothing_changes(build: str):
    _, opt = train_net(build)
    state = copy.deepcopy(opt.state_dict())
    _, other = train_net(build)
    train_numbered(other.model, other, range(5, 7))
    count = 0
    for path in paths(state):
        kept = parent(state, path)
        if path == ("natgrad",) or path[-1] == "natgrad" or not isinstance(kept, dict):
            continue  # there are two of these; and lists are not cut
        value = kept.pop(path[-1])
        if value != {} and not (path == ("state",) and not any(value.values())):
            refuses(other, state)
        kept[path[-1]] = value
        count += 1
    assert count > 20
    other.load_state_dict(state)
    assert same(copy.deepcopy(other.state_dict()), copy.deepcopy(opt.state_dict()))


def wider() -> nn.Module:
    return mlp(3, 6, 3)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "wider": wider,
    "deeper": lambda: mlp(3, 4, 4, 3),
    "without a bias": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)).double(),
    "other names": lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
    "other inputs": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 1)).double(),
}


@pytest.mark.parametrize("form", ["today's", "older", "in groups"])
@pytest.mark.parametrize("build", ["kfac", "no momentum", "hessian_free"])
@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_model_is_refused_and_nothing_changes(other: str, build: str, form: str):
    _, opt = train_net(build)
    state = {"today's": opt.state_dict, "older": lambda: older(opt), "in groups": opt.state_dict}[form]()
    if form == "in groups":
        state.pop("natgrad")
    model = OTHERS[other]()
    if (form, build, other) == ("older", "hessian_free", "other names"):
        pytest.skip("older states of a flat metric have no names")
    refuses(BUILDS[build](model), state)


MISFITS = [
    ("kfac", "diagonal"),
    ("unitwise", "kfac"),
    ("kfac", "tonga"),
    ("averaged", "momentum"),
    ("hessian_free", "kfac"),
    ("kfac", "hessian_free"),
    ("sampled", "momentum"),
]


@pytest.mark.parametrize("form", ["today's", "older"])
@pytest.mark.parametrize(("saved", "loaded"), MISFITS)
def test_the_state_of_another_structure_is_refused_and_nothing_changes(saved: str, loaded: str, form: str):
    _, opt = train_net(saved)
    if form == "older" and saved in ("averaged", "unitwise"):
        pytest.skip("older states do not say whose they are, and small blocks are alike")
    refuses(train_net(loaded)[1], opt.state_dict() if form == "today's" else older(opt))


@pytest.mark.parametrize("build", ["two groups", "ekfac", "tonga", "momentum"])
def test_any_tensor_of_another_shape_is_refused_and_nothing_changes(build: str):
    _, opt = train_net(build)
    other = train_net(build)[1]
    for path in paths(state := copy.deepcopy(opt.state_dict())):
        kept = parent(state, path)
        value = kept[path[-1]]
        if isinstance(value, torch.Tensor) and value.dim() > 0 and path[0] == "state":
            kept[path[-1]] = value.new_ones(*value.shape[:-1], value.shape[-1] + 7)
            refuses(other, state)
            kept[path[-1]] = value


def test_a_generator_of_another_kind_of_device_draws_anew():
    state = older(train_net("kfac")[1])
    state["natgrad"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # as on an accelerator
    twin, other = fresh("kfac")
    other.load_state_dict(state)
    train_numbered(twin, other, range(2))


def test_parameters_frozen_since_leave_the_rest_as_it_was():
    model, opt = train_net("kfac")
    twin, other = fresh("kfac")
    for p in twin[0].parameters():
        p.requires_grad_(False)
    names, state = copy.deepcopy(get_state_dict(model, opt))
    set_state_dict(twin, other, model_state_dict=names, optim_state_dict=state)
    for p in model[0].parameters():
        p.requires_grad_(False)
    train_numbered(model, opt, range(5, 8))
    train_numbered(twin, other, range(5, 8))
    assert torch.equal(flat(model), flat(twin))
