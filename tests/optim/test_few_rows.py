"""A spectral step of few rows is shorter: by the root of rows per singular value of the layer."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_state import blocks_of, change_state, kept_of
from torch import Tensor, nn

import natgrad as ng
from natgrad.layers import Seen
from natgrad.rules import SpectralDescent
from natgrad.rules.base import BlockPoint

F64 = torch.float64
OUTPUTS, INPUTS = 16, 20


def mean_positions(numbers: dict[str, Any]) -> float:
    """Examples times positions of a step; infinite where nothing is known."""
    return numbers["positions"] / numbers["readings"] if "readings" in numbers else math.inf


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(("positions", "share"), [(8, 0.25), (32, 1.0), (500, 1.0), (math.inf, 1.0)])
def test_a_direction_is_shorter_by_the_root_of_rows(positions: float, share: float) -> None:
    n = draw(1, OUTPUTS, INPUTS)

    def shape(rows: float) -> Tensor:
        kept = {"inputs": torch.ones(INPUTS, dtype=F64)}
        point = BlockPoint(
            ("w",), "Kronecker", n, lambda: n, None, lambda: pytest.fail("asked"), 0.1, kept, positions=rows
        )
        return SpectralDescent(enough=2.0).shape(point)[0]

    torch.testing.assert_close(shape(positions), math.sqrt(share) * shape(math.inf))


def train(model: nn.Module, x: Tensor, y: Tensor, parts: int = 1, steps: int = 1, **options: Any) -> Any:
    """Spectral steps from batches in as many micro-batches. The blocks' numbers are in the optimizer's state."""
    opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=SpectralDescent(**options), update_every=1, invert_every=1)
    for _ in range(steps):
        opt.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (opt.loss(model(a), b) / parts).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("rows", [4, 12, 64])
def test_a_step_of_few_rows_is_shorter(rows: int) -> None:
    x, y = draw(rows, INPUTS), torch.arange(rows) % OUTPUTS
    first = nn.Linear(INPUTS, OUTPUTS, dtype=F64)
    moved = dict[float, Tensor]()
    for enough in (1e-9, 2.0):
        model = copy.deepcopy(first)
        train(model, x, y, enough=enough)
        moved[enough] = model.weight.detach() - first.weight.detach()
    assert float(moved[1e-9].norm()) > 0
    torch.testing.assert_close(moved[2.0], math.sqrt(min(1, rows / 2 / OUTPUTS)) * moved[1e-9])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_count_as_one_step(parts: int) -> None:
    model = nn.Linear(INPUTS, OUTPUTS, dtype=F64)
    opt = train(model, draw(8, INPUTS), torch.arange(8) % OUTPUTS, parts, steps=3)
    numbers = kept_of(opt, model.weight)
    assert numbers["positions"] / numbers["readings"] == pytest.approx(8)


def test_positions_of_images_and_texts_count() -> None:
    image = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4)).double()
    opt = train(image, draw(7, 3, 6, 6), torch.arange(7) % 4)
    found = [kept_of(opt, image[i].weight) for i in (0, 3)]
    assert [one["positions"] / one["readings"] for one in found] == [7 * 36, 7]

    text = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double()
    model = ng.kfac(text, nn.CrossEntropyLoss(), rule=SpectralDescent())
    tokens = torch.arange(20).view(4, 5) % 9
    model.loss(text(tokens).transpose(1, 2), tokens).backward()
    model.step()
    assert kept_of(model, text[1].weight)["positions"] == 20


def test_groups_that_see_some_count_their_mean() -> None:
    layer = nn.Linear(2, 3)
    seen = Seen(layer, torch.zeros(2, 5, 4, 2), [torch.zeros(2, 5, 4, 3)], counts=torch.tensor([4.0, 6, 2, 0]))  # type: ignore[arg-type]
    assert seen.positions == 3
    assert Seen(layer, torch.zeros(6, 5, 1, 2), [torch.zeros(6, 5, 1, 3)], cotangents=3).positions == 10  # type: ignore[arg-type]


def test_rows_are_saved_and_older_checkpoints_learn_them() -> None:
    x, y = draw(6, INPUTS), torch.arange(6)
    opt = train(model := nn.Linear(INPUTS, OUTPUTS, dtype=F64), x, y, steps=2)

    def resume() -> dict[str, Any]:
        fresh = ng.kfac(other := copy.deepcopy(model), nn.CrossEntropyLoss(), rule=SpectralDescent())
        fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
        loaded = kept_of(fresh, other.weight)
        fresh.loss(other(x), y).backward()
        fresh.step()
        return {"loaded": loaded, "stepped": kept_of(fresh, other.weight)}

    assert mean_positions(resume()["loaded"]) == pytest.approx(6)
    block = blocks_of(opt)[0]
    change_state(opt, blocks={block.key: replace(block, positions=0.0, readings=0.0)})
    older = resume()
    assert mean_positions(older["loaded"]) == math.inf  # the whole length
    assert mean_positions(older["stepped"]) == pytest.approx(6)


@pytest.mark.parametrize("rows", [2, 5, 40, 1000])
def test_inputs_are_whitened_as_far_as_rows_tell(rows: int) -> None:
    damping, scarce = 0.3, 1.5
    x = draw(rows, INPUTS) @ torch.diag(torch.logspace(-2, 1, INPUTS, dtype=F64))
    model = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=F64)
    opt = train(model, x, torch.arange(rows) % OUTPUTS, damping=damping, scarce=scarce)
    kept = kept_of(opt, model.weight)
    moment, root = x.T @ x / rows, kept["prepared"]["inputs"]
    ridge = max(damping, scarce * INPUTS / rows)
    expected = torch.linalg.inv(INPUTS * moment / moment.trace() + ridge * torch.eye(INPUTS, dtype=F64))
    torch.testing.assert_close(root.mT @ root, expected * (1 + ridge) / (1 + damping), rtol=1e-8, atol=1e-10)


def test_white_inputs_move_as_far_with_few_rows() -> None:
    eye = torch.eye(INPUTS, dtype=F64)
    for rows in (0.0, 1.0, 7.0, 1e6, math.inf):
        root = SpectralDescent().prepare_inputs(eye, False, rows)["inputs"]
        torch.testing.assert_close(root.mT @ root, eye / 1.3)


def test_tokens_are_whitened_by_all_rows_alike() -> None:
    often = torch.tensor([4.0, 1.0, 0.0], dtype=F64)
    few, many = (SpectralDescent().prepare_inputs(often, True, rows)["tokens"] for rows in (1.0, math.inf))
    torch.testing.assert_close(few, (often / often.mean() + 0.3).rsqrt())
    torch.testing.assert_close(few, many)


@pytest.mark.parametrize(("name", "value"), [("enough", 0), ("renewed", 0), ("scarce", -1.0), ("scarce", math.inf)])
def test_rows_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        replace(SpectralDescent(), **{name: value})
