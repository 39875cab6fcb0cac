"""Models that are held in parts or copied, and groups that are none: refused at the door, each in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from optim_models import BLOCK_RECIPES, CE, FREE_RECIPES, X, Y, flat, iterate, net
from process_ranks import needs_gloo
from torch import distributed, nn

import natgrad as ng

pytestmark = needs_gloo


LAYERS = BLOCK_RECIPES
FLAT = [*FREE_RECIPES, lambda model, loss, **options: ng.NaturalGradient(model, ng.fisher(model, loss), **options)]
wrap = nn.parallel.DistributedDataParallel


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A process group of this process alone: everything is wrapped as it is with many."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    distributed.destroy_process_group()


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


def fully_sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net(), mesh=mesh())


def partly_sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model[2], mesh=mesh())  # type: ignore[index]
    return nn.Sequential(nn.Identity(), model)


def fsdp(use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def tensor_parallel() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(net(), mesh(), {"0": ColwiseParallel()})


def copy_model() -> nn.Module:
    model = nn.DataParallel(net())
    model.device_ids = [0, 1]  # as with two accelerators
    return nn.Sequential(model)


IN_PARTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fully_shard": (fully_sharded, "FSDPModule|DTensor"),
    "fully_shard of a layer": (partly_sharded, "FSDPModule|DTensor"),
    "FSDP": (lambda: fsdp(False), "FullyShardedDataParallel"),
    "FSDP with its own parameters": (lambda: fsdp(True), "FullyShardedDataParallel"),
    "tensor parallel": (tensor_parallel, "DTensor"),
    "DataParallel": (copy_model, "DataParallel over 2 devices"),
}
NEVER = {"FSDP", "FSDP with its own parameters", "DataParallel"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", IN_PARTS)
def test_a_model_that_is_not_whole_here_is_refused_by_all(kind: str):
    build, words = IN_PARTS[kind]
    model = build()
    for recipe in [*(LAYERS if kind in NEVER else []), *FLAT]:
        with pytest.raises(TypeError, match=f"model is .*({words})"):
            recipe(model, CE)


@pytest.mark.parametrize("build", [fully_sharded, tensor_parallel])
def test_parameters_by_name_that_are_not_whole_here_are_refused(build: Callable[[], nn.Module]):
    held, metric = dict(build().named_parameters()), ng.fisher(net(), CE)
    for recipe in (ng.NaturalGradient, ng.ang):
        with pytest.raises(TypeError, match="dict with a DTensor in it, whose parameters are not whole"):
            recipe(held, metric)


@pytest.mark.parametrize("kind", sorted(IN_PARTS.keys() - NEVER))
def test_a_model_in_parts_is_trained_by_blocks_and_not_at_trial_points(kind: str):
    build, _ = IN_PARTS[kind]
    model = build()
    for options in ({"damping": ng.LevenbergMarquardt(0.1, per="block")}, {"rule": ng.LineSearch()}):
        with pytest.raises(ValueError, match="computes the loss at trial points"):
            ng.kfac(model, CE, **options)
    opt = ng.kfac(model, CE)
    iterate(opt, model, X, Y)
    assert opt.state_report().failures == 0


@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_a_model_that_is_cut_into_parts_after_the_optimizer_was_built_is_refused(recipe: Callable[..., Any]):
    from torch.distributed.fsdp import fully_shard

    model = net()
    opt = recipe(model, CE)
    fully_shard(model, mesh=mesh())
    with pytest.raises(TypeError, match=r"FSDPModule|DTensor"):
        iterate(opt, model, X, Y)


@pytest.mark.parametrize("recipe", FLAT)
def test_a_wrapper_inside_of_the_model_is_refused_by_what_calls_it_as_a_function(recipe: Callable[..., Any]):
    with pytest.raises(TypeError, match="DistributedDataParallel in it, which is no function of parameters"):
        recipe(nn.Sequential(wrap(net())), CE)


OF_ONE_PROCESS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a posterior": (lambda m: ng.variational(m, criterion=CE, data_size=8), "target is a DistributedDataParallel"),
    "a posterior of a part": (
        lambda m: ng.variational(nn.Sequential(m), criterion=CE, data_size=8),
        "target is a DistributedDataParallel, or has one in it",
    ),
    "a policy": (lambda m: ng.TRPO(m, "CartPole-v1"), "policy is a DistributedDataParallel"),
    "a critic": (lambda m: ng.TRPO(None, "CartPole-v1", critic=m), "critic is a DistributedDataParallel"),
    "a wave function": (
        lambda m: ng.LogAmplitude(nn.Sequential(nn.Flatten(), m)),
        "net is a DistributedDataParallel, or has one in it",
    ),
}


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
def test_what_is_trained_by_one_process_takes_no_wrapper(name: str):
    if "polic" in name or "critic" in name:
        pytest.importorskip("gymnasium")
    build, words = OF_ONE_PROCESS[name]
    with pytest.raises(TypeError, match=words):
        build(wrap(nn.Linear(4, 2)))


def test_a_copy_on_no_device_is_the_model_itself():
    alone, model = net(), net()
    outer = nn.DataParallel(model, device_ids=[])
    plain, opt = (ng.kfac(m, CE, damping=ng.LevenbergMarquardt(0.1, per="block")) for m in (alone, outer))
    for _ in range(6):
        iterate(plain, alone, X, Y)
        iterate(opt, outer, X, Y)
    assert torch.equal(flat(alone), flat(model))
    for recipe in FLAT:
        assert recipe(outer, CE).model is model


@pytest.mark.parametrize("recipe", [*LAYERS, *FLAT])
def test_every_recipe_takes_a_group_and_refuses_what_is_none(recipe: Callable[..., Any]):
    alone, model = net(), net()
    iterate(recipe(alone, CE), alone, X, Y)
    iterate(recipe(model, CE, group=distributed.group.WORLD), model, X, Y)
    assert torch.equal(flat(alone), flat(model))
    with pytest.raises(TypeError, match="group is 'gloo', expected a process group"):
        recipe(net(), CE, group="gloo")


def test_a_group_other_than_the_wrappers_or_of_no_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = wrap(net())
    with pytest.raises(ValueError, match="other processes than group"):
        ng.kfac(model, CE, group=distributed.new_group([0]))
    ng.kfac(model, CE, group=model.process_group)
    with pytest.raises(ValueError, match=r"parameters \['1.weight', '1.bias'\] lie outside"):
        ng.kfac(nn.Sequential(wrap(net()), nn.Linear(3, 3).double()), CE)
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="init_process_group"):
        ng.kfac(net(), CE, group=object())
