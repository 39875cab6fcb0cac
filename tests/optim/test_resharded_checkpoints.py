"""Checkpoints of `torch.distributed.checkpoint` that are written by some processes and read by others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_seeded, draw
from optim_models import same, train_batches
from process_ranks import call_ranks, catch, count_ranks, flat_whole, needs_gloo, own_rank, take_part
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.ground import whole_tensors as lost_processes

pytestmark = needs_gloo
if distributed.is_available():
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

X = draw(32, 6)
Y = X[:, :4].argmax(1)
Way = tuple[str, str]


def build(way: Way, first: float = 0.0) -> tuple[nn.Module, Any]:
    """A model in an engine and its optimizer, both as nobody left them."""
    engine, share = way
    model: nn.Module = build_seeded(lambda: nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 4)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(first)
    if engine == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    # else it sorts its buckets anew after the first backward, and sums of four numbers round by their place there
    outer = DistributedDataParallel(model, find_unused_parameters=True) if engine == "data parallel" else model
    return outer, ng.kfac(outer, nn.CrossEntropyLoss(), share=share, update_every=2, invert_every=2)


def train(model: nn.Module, opt: Any, steps: int) -> None:
    own = take_part([32 // count_ranks()] * count_ranks())
    train_batches(opt, model, [(X[own], Y[own])] * steps)


def everything(model: nn.Module, opt: Any) -> dict[str, Any]:
    """The whole state as one process sees it; a copy, since the next steps write where the old numbers are."""
    model_state, state = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    return copy.deepcopy({"model": dict(model_state), "state": state["state"]})


def begin(way: Way, folder: str) -> dict[str, Any]:
    """Three steps, a checkpoint, and three steps more."""
    model, opt = build(way)
    train(model, opt, 3)
    model_state, state = get_state_dict(model, opt)
    checkpoint.save({"m": model_state, "o": state}, checkpoint_id=folder)
    found = everything(model, opt)
    train(model, opt, 3)
    return found | {"end": flat_whole(model)}


def pass_on(way: Way, folder: str, next_folder: str, steps: int) -> dict[str, Any]:
    """The checkpoint in a fresh optimizer, saved again in the background, and some steps."""
    model, opt = build(way, first=1.0)
    model_state, state = get_state_dict(model, opt)
    found = {"m": model_state, "o": state}
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=found["m"], optim_state_dict=found["o"])
    model_state, state = get_state_dict(model, opt)
    if next_folder:
        checkpoint.async_save({"m": model_state, "o": state}, checkpoint_id=next_folder).result()
    kept = everything(model, opt)
    train(model, opt, steps)
    return kept | {"end": flat_whole(model)}


DATA, PARTS = ("data parallel", "memory"), ("fully_shard", "memory")
CHAINS: list[list[tuple[int, Way]]] = [
    [(4, DATA), (2, ("fully_shard", "speed")), (1, ("alone", "auto")), (4, DATA)],
    [(4, PARTS), (2, ("data parallel", "memory")), (4, PARTS)],
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chain", CHAINS, ids=["data parallel", "fully_shard"])
def test_a_state_passes_through_other_numbers_of_processes_bit_for_bit(chain: list[tuple[int, Way]], tmp_path: Path):
    size, way = chain[0]
    first = call_ranks(__name__, "begin", size, tmp_path, way, str(tmp_path / "0"))
    assert all(same(rank, first[0]) for rank in first)
    for i, (size, way) in enumerate(chain[1:]):
        last = i == len(chain) - 2
        folders = str(tmp_path / f"{i}"), "" if last else str(tmp_path / f"{i + 1}")
        ranks = call_ranks(__name__, "pass_on", size, tmp_path, way, *folders, 3 if last else 0)
        for rank in ranks:
            assert same(rank["model"], first[0]["model"])
            assert same(rank["state"], first[0]["state"])
    assert all(torch.equal(rank["end"], first[0]["end"]) for rank in ranks)


def save_alone() -> str:
    """The error where the first process alone asks for the state."""
    model, opt = build(DATA)
    train(model, opt, 1)
    lost_processes.wait_for_all.__kwdefaults__, lost_processes.wait_for_all.__defaults__ = None, (0.5,)
    return catch(RuntimeError, opt.state_dict) if own_rank() == 0 else ""


def test_a_state_in_parts_is_not_saved_by_one_process_alone(tmp_path: Path):
    text = call_ranks(__name__, "save_alone", 2, tmp_path)[0]
    assert "on 1 of 2 processes" in text
    assert 'share="memory"' in text
