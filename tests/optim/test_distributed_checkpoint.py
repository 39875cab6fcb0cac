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
from saved_runs import BUILDS, run_build
from torch import distributed, nn

import natgrad as ng
from natgrad.optim.checkpoint import name_positions

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed")
if distributed.is_available():
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

Optimizer = Any
Way = Callable[[nn.Module, Optimizer, nn.Module, Optimizer, Path], None]


def fresh(build: str) -> tuple[nn.Module, Optimizer]:
    """A model elsewhere, and its optimizer before the first step."""
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    return model, BUILDS[build](model)


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


def in_the_oldest_state(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(older(opt))


def in_a_state_of_format_1(model: nn.Module, opt: Optimizer, twin: nn.Module, other: Optimizer, folder: Path) -> None:
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(first_format(opt))


def older(opt: Optimizer) -> dict[str, Any]:
    """The state as it was saved before it survived `get_state_dict`."""
    state = copy.deepcopy(opt.state_dict())
    extra = {key: value for key, value in state["natgrad"].items() if key not in ("shapes", "structure", "format")}
    if extra.pop("kind") == "system":  # up to format 2 with entries of its own
        clock = extra.pop("clock")
        counts = {key: clock[key] for key in ("failures", "refused", "skipped", "late", "unmoved", "judged", "seen")}
        extra = {key: extra[key] for key in ("damping", "memory", "preconditioner", "wild", "outside", "generator")}
        extra |= {"steps": clock["step"], **counts}
    groups = [{key: value for key, value in group.items() if key != "natgrad"} for group in state["param_groups"]]
    plain = copy.deepcopy(opt._by_parameter())
    kept = {i: plain[name] for i, (name, _) in enumerate(name_positions(opt)) if plain.get(name)}
    return {"state": kept, "param_groups": groups, "natgrad": extra}


def first_format(opt: Optimizer) -> dict[str, Any]:
    """The state as format 1 had it: numbers and words by parameter, and one mapping in a tuple."""
    state = older(opt)
    names = [name for name, _ in name_positions(opt)]
    named, kind = copy.deepcopy(opt.state_dict()["natgrad"]), type(opt.structure).__name__
    state["natgrad"] |= {"format": 1, "structure": kind, "shapes": named["shapes"], "dtypes": named["dtypes"]}
    whole = {"extra": state["natgrad"], "state": {names[i]: numbers for i, numbers in state["state"].items()}}
    state["param_groups"][0]["natgrad"] = (copy.deepcopy(whole),)
    return state


CASES: list[tuple[str, Way]] = [("kfac", in_a_folder), ("preconditioned", in_a_folder), ("two groups", in_a_folder)]
CASES += [(build, in_a_plain_folder) for build in ("online_ng", "momentum")]
CASES += [("kfac", in_a_file), ("averaged", in_a_file)]
CASES += [(build, in_the_oldest_state) for build in ("two groups", "unitwise", "preconditioned", "sampled")]
CASES += [(build, in_a_state_of_format_1) for build in ("two groups", "online_ng", "momentum")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "way"), CASES)
def test_a_fresh_optimizer_goes_on_bit_for_bit(build: str, way: Way, tmp_path: Path):
    model, opt = run_build(build)
    twin, other = fresh(build)
    way(model, opt, twin, other, tmp_path)
    assert same(other.state_dict(), copy.deepcopy(opt.state_dict()))
    train_numbered(model, opt, range(5, 8))
    train_numbered(twin, other, range(5, 8))
    assert torch.equal(flat(model), flat(twin))
    assert same(opt.state_dict(), other.state_dict())


OPTION = "flatten_optimizer_state_dict"
NAMES = ("full_state_dict", "cpu_offload", OPTION)
OPTIONS = [dict(zip(NAMES, on, strict=True)) for on in itertools.product((False, True), repeat=3)]


def hand_over(model: nn.Module, opts: Any, twin: nn.Module, others: Any, options: dict[str, bool]) -> None:
    """Saves with these options and loads with them; torch loads what is flattened and full with the first alone."""
    names, state = copy.deepcopy(get_state_dict(model, opts, options=StateDictOptions(**options)))
    chosen = StateDictOptions(**(options | ({"full_state_dict": False} if options[OPTION] else {})))
    set_state_dict(twin, others, model_state_dict=names, optim_state_dict=state, options=chosen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", ["two groups", "preconditioned", "averaged"])
def test_every_choice_of_options_hands_over_the_state(build: str):
    """Of some steps and of none."""
    model, opt = run_build(build)
    start, unused = fresh(build)
    for options in OPTIONS:
        twin, other = fresh(build)
        hand_over(model, opt, twin, other, options)
        assert same(other.state_dict(), opt.state_dict()), options
        hand_over(start, unused, twin, other, options)
        assert same(other.state_dict(), unused.state_dict()), options


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[-1]])
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


def assert_refused(opt: Optimizer, state: Any) -> None:
    before = snapshot(opt)
    with pytest.raises(ValueError, match="state_dict"):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("build", ["ekfac", "averaged"])
def test_a_state_that_lost_any_part_or_has_a_tensor_of_another_shape_is_refused(build: str):
    opt, other = run_build(build)[1], run_build(build, 7)[1]
    state = copy.deepcopy(opt.state_dict())
    for path in paths(state):
        kept = parent(state, path)
        if path == ("natgrad",) or path[-1] == "natgrad" or not isinstance(kept, dict):
            continue  # there are two of these; and lists are not cut
        value = kept.pop(path[-1])
        if value != {} and not (path == ("state",) and not any(value.values())):
            assert_refused(other, state)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and path[0] == "state":
            kept[path[-1]] = value.new_ones(*value.shape[:-1], value.shape[-1] + 7)
            assert_refused(other, state)
        kept[path[-1]] = value
    other.load_state_dict(state)
    assert same(copy.deepcopy(other.state_dict()), copy.deepcopy(opt.state_dict()))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "wider": lambda: mlp(3, 6, 3),
    "deeper": lambda: mlp(3, 4, 4, 3),
    "without a bias": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)).double(),
    "other names": lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
    "other inputs": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 1)).double(),
}


@pytest.mark.parametrize("build", ["kfac", "no momentum", "hessian_free"])
def test_the_state_of_another_model_is_refused_and_nothing_changes(build: str):
    opt = run_build(build)[1]
    for other, make in OTHERS.items():
        model = make()
        twin, state = BUILDS[build](model), opt.state_dict()
        assert_refused(twin, state)
        assert_refused(twin, {key: value for key, value in state.items() if key != "natgrad"})
        if (build, other) != ("hessian_free", "other names"):  # older states of a flat metric have no names
            assert_refused(twin, older(opt))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("kfac", "diagonal"),
        ("unitwise", "kfac"),
        ("kfac", "tonga"),
        ("averaged", "momentum"),
        ("hessian_free", "kfac"),
        ("kfac", "hessian_free"),
        ("sampled", "momentum"),
    ],
)
def test_the_state_of_another_structure_is_refused_and_nothing_changes(saved: str, loaded: str):
    opt, other = run_build(saved)[1], run_build(loaded)[1]
    assert_refused(other, opt.state_dict())
    if saved not in ("averaged", "unitwise"):  # older states do not say whose they are, and small blocks are alike
        assert_refused(other, older(opt))


def test_a_generator_of_another_kind_of_device_draws_anew():
    state = older(run_build("kfac")[1])
    state["natgrad"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # as on an accelerator
    twin, other = fresh("kfac")
    other.load_state_dict(state)
    train_numbered(twin, other, range(2))


def test_parameters_frozen_since_leave_the_rest_as_it_was():
    model, opt = run_build("kfac")
    twin, other = fresh("kfac")
    twin[0].requires_grad_(False)
    names, state = copy.deepcopy(get_state_dict(model, opt))
    set_state_dict(twin, other, model_state_dict=names, optim_state_dict=state)
    model[0].requires_grad_(False)
    train_numbered(model, opt, range(5, 8))
    train_numbered(twin, other, range(5, 8))
    assert torch.equal(flat(model), flat(twin))
