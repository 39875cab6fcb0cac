"""Models of other packages in their own loops, of which two lines change; each test needs its package.

The versions that these were run with stand in docs/guides/other_packages.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_packages import declare_image_operators
from torch import Tensor, nn

import natgrad as ng

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs; sent between test processes, they would be imported there

RECIPES = [ng.kfac, ng.hessian_free]
Loss = Callable[[Any, Any, int], Tensor]


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.__name__)
def recipe(request: pytest.FixtureRequest) -> Any:
    return request.param


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_training(
    build: Callable[[], tuple[nn.Module, Any]], loss_of: Loss, folder: Path, steps: int = 16, share: float = 0.7
) -> None:
    """The loss falls below a share of the first, and a run from a checkpoint half-way ends as the run itself."""

    def train(model: nn.Module, opt: Any, numbers: range) -> list[float]:
        losses = list[float]()
        for number in numbers:
            opt.zero_grad()
            loss = loss_of(model, opt, number)
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        return losses

    model, opt = build()
    losses = train(model, opt, range(steps // 2))
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, folder / "half.pt")
    losses += train(model, opt, range(steps // 2, steps))
    assert opt.state_report().failures == 0
    assert sum(losses[-4:]) < share * sum(losses[:4])
    saved = torch.load(folder / "half.pt", weights_only=True)
    other, again = build()
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["opt"])
    assert train(other, again, range(steps // 2, steps)) == losses[steps // 2 :]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_graph_network_of_torch_geometric(recipe: Any, tmp_path: Path):
    geometric = pytest.importorskip("torch_geometric.nn")
    y = torch.arange(60) % 3
    x, ends = draw(60, 16) + nn.functional.one_hot(y, 16), torch.arange(300).remainder(60)
    edges = torch.stack([ends, (ends + 3 * torch.arange(300).div(60, rounding_mode="floor")) % 60])
    seen = torch.arange(60) < 30

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = geometric.GCNConv(16, 16), geometric.GCNConv(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = GCN()
        return model, recipe(model, nn.CrossEntropyLoss())

    def loss_of(model: Any, opt: Any, number: int) -> Tensor:
        return opt.loss(model(x, edges)[seen], y[seen])

    check_training(build, loss_of, tmp_path)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_a_flow_of_zuko(recipe: Any, tmp_path: Path):
    zuko = pytest.importorskip("zuko")
    x = draw(256, 2) * torch.tensor([1.0, 0.3])
    x[:, 1] += x[:, 0] ** 2

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        flow = zuko.flows.NSF(features=2, transforms=2, hidden_features=(16, 16))
        return flow, recipe(flow, ng.LogDensity())

    def loss_of(flow: Any, opt: Any, number: int) -> Tensor:
        return opt.loss(flow().log_prob(x))

    check_training(build, loss_of, tmp_path)


def test_a_differential_equation_of_torchdiffeq(recipe: Any, tmp_path: Path):
    torchdiffeq = pytest.importorskip("torchdiffeq")
    times, start = torch.linspace(0, 1, 5), draw(16, 2)
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    paths = torch.stack([start @ torch.matrix_exp(turn * t) for t in times], 1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    class Solution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = Flow()

        def forward(self, y: Tensor) -> Tensor:
            return torchdiffeq.odeint(self.flow, y, times, method="rk4").movedim(0, 1)

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Solution()
        return model, recipe(model, nn.MSELoss())

    def loss_of(model: Any, opt: Any, number: int) -> Tensor:
        return opt.loss(model(start), paths)

    check_training(build, loss_of, tmp_path)


def test_the_adjoint_of_torchdiffeq_has_a_sentence_where_it_does_not_do():
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    class Solution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = Flow()

        def forward(self, y: Tensor) -> Tensor:
            return torchdiffeq.odeint_adjoint(self.flow, y, torch.linspace(0, 1, 3), method="rk4")[-1]

    model, x = Solution(), draw(8, 2)
    opt = ng.hessian_free(model, nn.MSELoss())
    opt.loss(model(x), 2 * x).backward()
    with pytest.raises(RuntimeError, match="odeint in place of odeint_adjoint"):
        opt.step()


def test_a_flow_of_pyro(tmp_path: Path):
    """The loop of its tutorial on normalizing flows, which clears the transforms' cache after each step."""
    distributions = pytest.importorskip("pyro.distributions")
    transforms = pytest.importorskip("pyro.distributions.transforms")
    x = draw(256, 2) * torch.tensor([1.0, 0.3])
    x[:, 1] += x[:, 0] ** 2
    base = distributions.Normal(torch.zeros(2), torch.ones(2))

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.ModuleList([transforms.spline_coupling(2, count_bins=8)])
        return model, ng.kfac(model, ng.LogDensity())

    def loss_of(model: Any, opt: Any, number: int) -> Tensor:
        flow = distributions.TransformedDistribution(base, list(model))
        flow.clear_cache()
        return opt.loss(flow.log_prob(x))

    check_training(build, loss_of, tmp_path, steps=32)


def test_the_posterior_of_a_model_of_pyro():
    """Its potential energy is the log joint: the exact posterior of a linear regression."""
    pyro = pytest.importorskip("pyro")
    util = pytest.importorskip("pyro.infer.mcmc.util")
    x = draw(50, 2).double()
    y = x @ torch.tensor([1.0, -2.0]).double() + 0.1 * draw(50, seed=1).double()
    prior = torch.zeros(2).double()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", pyro.distributions.Normal(prior, 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", pyro.distributions.Normal(x @ w, 0.5), obs=y)

    _, potential, _, _ = util.initialize_model(model, (x, y))
    q = ng.variational(lambda z: torch.stack([-potential({"w": row}) for row in z]), start=torch.zeros(2).double())
    with pyro.validation_enabled(False):  # its checks branch on values, which torch.func does not take
        q.fit(200)
    precision = torch.eye(2).double() + x.T @ x / 0.25
    torch.testing.assert_close(q.mean, torch.linalg.solve(precision, x.T @ y / 0.25), rtol=1e-3, atol=1e-3)


def test_a_small_unet_of_diffusers(tmp_path: Path):
    declare_image_operators()
    diffusers = pytest.importorskip("diffusers")
    x = draw(8, 1, 8, 8) * 0.1 + 0.5
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = diffusers.UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        return model, ng.kfac(model, nn.MSELoss())

    def loss_of(model: Any, opt: Any, number: int) -> Tensor:
        noise, t = draw(8, 1, 8, 8, seed=number), torch.arange(8) * 12 + number % 4
        return opt.loss(model(scheduler.add_noise(x, noise, t), t, return_dict=False)[0], noise)

    check_training(build, loss_of, tmp_path, steps=24)
