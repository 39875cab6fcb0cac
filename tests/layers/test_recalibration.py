"""Running statistics of batch norm from the data: exact over the loader, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Assembled, draw
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng


def build() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 2)
    images = first, nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), second, nn.BatchNorm2d(4, momentum=None)
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5)).double()


X = 1 + draw(23, 2, 5, 5)
BATCHES = [X[:8], X[8:16], X[16:22], X[22:]]  # the last one has one row
NORMS = (1, 5, 8)


def heard_by(model: nn.Sequential, place: int, x: Tensor) -> Tensor:
    """What a norm gets in evaluation mode, as rows of channels."""
    model.eval()
    with torch.no_grad():
        return model[:place](x).movedim(1, -1).reshape(-1, model[place].num_features)


def statistics(model: nn.Sequential) -> list[Tensor]:
    return [t.clone() for k in NORMS for t in (model[k].running_mean, model[k].running_var)]  # type: ignore[misc]


def everything_else(model: nn.Module) -> dict[str, Any]:
    state = {name: value.clone() for name, value in model.state_dict().items() if "running" not in name}
    modes = {name: module.training for name, module in model.named_modules()}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    return {"state": state, "modes": modes, "grads": grads, "hooks": hooks, "random": torch.get_rng_state()}


@pytest.mark.parametrize("passes", [1, 3])
def test_as_many_passes_as_norms_make_evaluation_exact(passes):
    """After one, the first norm's moments are those of all examples together."""
    model = build()
    assert ng.recalibrate(model, BATCHES, passes=passes) is model
    for place in NORMS[:passes]:
        rows = heard_by(model, place, X)
        assert_close(model[place].running_mean, rows.mean(0), rtol=1e-10, atol=1e-12)
        assert_close(model[place].running_var, rows.var(0), rtol=1e-10, atol=1e-12)
    before = statistics(model)
    ng.recalibrate(model, [X[:3], X[3:]], passes=passes)  # the sizes of batches do not count
    for old, new in list(zip(before, statistics(model), strict=True))[: 2 * passes]:
        assert_close(old, new, rtol=1e-9, atol=1e-11)


def test_nothing_else_changes():
    model = build()
    model.train()
    model[0].eval()
    model(X).sum().backward()
    before = everything_else(model)
    ng.recalibrate(model, BATCHES, passes=2)
    after = everything_else(model)
    for part in ("modes", "hooks"):
        assert before[part] == after[part]
    for part in ("state", "grads"):
        assert all(torch.equal(value, after[part][name]) for name, value in before[part].items())
    assert torch.equal(before["random"], after["random"])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("passes", [1, 2])
def test_an_error_leaves_all_as_it_was(error, passes):
    model, calls = build().train(), []
    before, rest = statistics(model), everything_else(model)

    def stop_in_the_last_batch(net: nn.Module, batch: Tensor) -> None:
        calls.append(1)
        net(batch)
        if len(calls) == passes * len(BATCHES):
            raise error("stop")

    with pytest.raises(error):
        ng.recalibrate(model, BATCHES, forward=stop_in_the_last_batch, passes=passes)
    assert all(torch.equal(old, new) for old, new in zip(before, statistics(model), strict=True))
    after = everything_else(model)
    assert rest["modes"] == after["modes"]
    assert rest["hooks"] == after["hooks"]
    assert torch.equal(model[5].num_batches_tracked, rest["state"]["5.num_batches_tracked"])  # type: ignore[arg-type]


def test_batches_of_any_kind():
    expected = build()
    ng.recalibrate(expected, BATCHES)
    named = Assembled(lambda m, images: m.net(images), net=build())
    pairs, lists, own, few = build(), build(), build(), build()
    ng.recalibrate(pairs, ((x, torch.zeros(len(x))) for x in BATCHES))
    ng.recalibrate(lists, [[x] for x in BATCHES])
    ng.recalibrate(named, [{"images": x} for x in BATCHES])
    ng.recalibrate(own, [x.flatten() for x in BATCHES], forward=lambda net, x: net(x.view(-1, 2, 5, 5)))
    ng.recalibrate(few, [*BATCHES, 1e9 * X], batches=4)
    for model in (pairs, lists, named.net, own, few):
        assert all(torch.equal(a, b) for a, b in zip(statistics(expected), statistics(model), strict=True))


def test_norms_that_are_not_called_are_named(recwarn: pytest.WarningsRecorder):
    half = Assembled(lambda m, x: m.used(x), used=nn.BatchNorm1d(2), unused=nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match=r"\['unused'\] were not called"):
        ng.recalibrate(half, [torch.randn(4, 2)])
    ng.recalibrate(nn.Sequential(nn.BatchNorm1d(2)), [torch.randn(4, 2)])
    assert not recwarn.list


ROWS, NORM = [torch.ones(3, 2)], nn.BatchNorm1d(2)
WRONG = [
    (lambda: ng.recalibrate(nn.Linear(2, 2), ROWS), "no batch norm"),
    (lambda: ng.recalibrate(nn.BatchNorm1d(2, track_running_stats=False), ROWS), "no batch norm"),
    (lambda: ng.recalibrate(NORM, []), "no batches in pass 1"),
    (lambda: ng.recalibrate(NORM, ROWS[0]), r"one tensor \(3, 2\), expected batches of examples: x.split"),
    (lambda: ng.recalibrate(NORM, iter(ROWS), passes=2), "pass 2.*used up"),
    (lambda: ng.recalibrate(NORM, ROWS, passes=0), "passes is 0"),
    (lambda: ng.recalibrate(NORM, ROWS, batches=0), "batches is 0"),
    (lambda: ng.recalibrate(NORM, [1], forward=lambda m, b: None), "no batch norm was called"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()
