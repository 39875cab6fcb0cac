"""`ng.residuals(...).fit`: points drawn for every step, what it returns, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from process_ranks import call_ranks
from residual_nets import perceptron
from torch import Tensor, nn

import natgrad as ng
from natgrad.residuals import ResidualOptimizer

ENDS = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
TERMS = {"inside": lambda u, x: ng.laplacian(u, x) + 1, "boundary": lambda u, x: u(x)}


def build(**options: Any) -> tuple[nn.Module, ResidualOptimizer]:
    net = perceptron(1, 6, 1)
    return net, ng.residuals(net, TERMS, weights={"boundary": 3.0}, **options)


def sample(generator: torch.Generator) -> dict[str, Tensor]:
    return {"inside": torch.rand(20, 1, generator=generator, dtype=torch.float64), "boundary": ENDS}


def read(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_every_step_has_points_of_its_own_and_the_history_adds_up():
    drawn: list[Tensor] = []

    def note(generator: torch.Generator) -> dict[str, Tensor]:
        points = sample(generator)
        drawn.append(points["inside"])
        return points

    history = build()[1].fit(40, note)
    assert len({float(x[0]) for x in drawn}) == len(drawn) == len(history) == 40
    for loss, inside, boundary in zip(history["loss"], history["inside"], history["boundary"], strict=True):
        assert loss == pytest.approx(inside + 3 * boundary)
    assert history["loss"][-1] < 1e-3 * history["loss"][0]


def test_it_takes_the_steps_of_a_loop():
    net, opt = build()
    other, by_hand = build()
    points = sample(torch.Generator().manual_seed(3))
    losses = opt.fit(4, points)["loss"]
    assert losses == [float(by_hand.step(**points)) for _ in range(4)]
    assert torch.equal(read(net), read(other))


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped():
    net, opt = build(momentum=0.5)
    opt.fit(6, sample, seed=5)
    half, first = build(momentum=0.5)
    first.fit(3, sample, seed=5)
    other, second = build(momentum=0.5)
    other.load_state_dict(half.state_dict())
    second.load_state_dict(first.state_dict())
    second.fit(3, sample, seed=5)
    assert torch.equal(read(net), read(other))


@pytest.mark.parametrize("place", ["sample", "term", "callback"])
def test_ctrl_c_leaves_the_last_whole_step(place: str):
    taken: list[float] = []

    def interrupt(here: str) -> None:
        if here == place and len(taken) == 3:
            raise KeyboardInterrupt

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        interrupt("sample")
        return sample(generator)

    def inside(u: Any, x: Tensor) -> Tensor:
        interrupt("term")
        return ng.laplacian(u, x) + 1

    def note(opt: ResidualOptimizer) -> None:
        taken.append(opt.losses["inside"])
        interrupt("callback")

    net, other = build()[0], build()[0]
    opt, again = (ng.residuals(one, TERMS | {"inside": inside}) for one in (net, other))
    history = opt.fit(10, draw, callback=note)
    del taken[:]
    assert again.fit(3, sample)["loss"] == history["loss"]
    assert torch.equal(read(net), read(other))
    assert len(opt.fit(2, draw)) == 2


def test_a_callback_ends_it_and_progress_is_shown(capsys: pytest.CaptureFixture[str]):
    history = build()[1].fit(10, sample, callback=lambda opt: opt.losses["inside"] > 0, progress=True)
    assert len(history) == 1
    shown = capsys.readouterr().err
    assert "1 of 10 steps" in shown
    assert "inside" in shown
    build()[1].fit(2, sample, progress=False)
    assert capsys.readouterr().err == ""


def test_a_step_that_was_left_out_is_a_nan_and_the_next_one_has_other_points():
    net = build()[0]
    opt = ng.residuals(net, {"inside": lambda u, x: torch.log(u(x) * 0 - 1)}, on_trouble="skip")
    drawn: list[float] = []

    def note(generator: torch.Generator) -> dict[str, Tensor]:
        points = torch.rand(3, 1, generator=generator, dtype=torch.float64)
        drawn.append(float(points[0]))
        return {"inside": points}

    history = opt.fit(2, note)
    assert all(value != value for name in history.names for value in history[name])
    assert drawn[0] != drawn[1]


def fit_apart() -> tuple[list[float], Tensor, float]:
    """The losses, the weights and the first point of a fit by the processes that call this."""
    net = build()[0]
    drawn: list[float] = []

    def note(generator: torch.Generator) -> dict[str, Tensor]:
        points = sample(generator)
        drawn.append(float(points["inside"][0]))
        return points

    opt = ng.residuals(net, TERMS, group=torch.distributed.group.WORLD)
    history = opt.fit(4, note, callback=lambda opt: torch.distributed.get_rank() == 1 and len(drawn) == 3)
    return history["loss"], read(net), drawn[0]


def test_processes_draw_points_of_their_own_and_end_together(tmp_path: Path):
    (losses, weights, point), (others, same, other) = call_ranks(__name__, "fit_apart", 2, tmp_path)
    assert losses == others
    assert len(losses) == 3
    assert torch.equal(weights, same)
    assert point != other


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, ENDS), TypeError, "sample is Tensor, expected a function of a torch.Generator"),
        ((3, lambda generator: ENDS), TypeError, r"sample returned Tensor, .* \['inside', 'boundary'\]"),
        ((3, {"inside": ENDS}), ValueError, "no points for"),
        ((-1, sample), ValueError, "steps is -1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments: tuple[Any, ...], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        build()[1].fit(*arguments)


def test_a_callback_sees_the_history_so_far():
    opt, lengths = build()[1], list[int]()
    history = opt.fit(3, sample, callback=lambda opt: lengths.append(len(opt.history["loss"])))
    assert lengths == [1, 2, 3]
    assert opt.history is history
