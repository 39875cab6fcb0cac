"""The flat flow and the flow in blocks are one engine: dampings, rules and accidents mean the same in both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_state import blocks_of, state_of
from models import F64, assert_close, build_seeded, cross, draw, pair
from optim_models import CE, X, flat, net, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import BlockPoint, Memory, Objective, Quadratic, Step

LM = ng.LevenbergMarquardt
RULES = [
    ng.Rate(),
    ng.Momentum(0.5),
    ng.Momentum(0.5, radius=0.01),
    ng.TrustRegion(0.01),
    ng.TrustRegion(0.5, backtracks=3),
    ng.LineSearch(),
    ng.OnlineRadius(),
    ng.MeasuredLength(),
    ng.MeasuredLength(kl_share=1e-3),
]
DAMPINGS = [
    ng.Constant(0.1),
    ng.Relative(0.1),
    ng.Relative(0.1, per="block"),
    LM(0.1, every=1),
    LM(0.1, per="block", every=1),
]


@dataclass(frozen=True)
class PlainKronecker(ng.Kronecker):
    """The exact damped inverse, of labels summed over."""

    estimate: Any = ng.ExactLabels()


LOOKING = RULES[8]  # at the metric and at the loss
BOTH = [(CE, *both) for both in cross([LOOKING], [rule for rule in RULES if rule is not LOOKING], DAMPINGS)]
BOTH += [(nn.MSELoss(), *both) for both in pair(RULES, DAMPINGS)]


@pytest.mark.parametrize(("criterion", "rule", "damping"), BOTH, ids=str)
def test_both_flows_take_the_same_steps(criterion: nn.Module, rule: ng.Rule, damping: ng.Damping):
    """For one example a Kronecker block is the layer's metric itself, so that measured and promised forms agree."""
    x, y = draw(1, 4), torch.tensor([1]) if criterion is CE else draw(1, 3, seed=1)
    models = [build_seeded(lambda: nn.Linear(4, 3)) for _ in range(2)]
    structure, metric = PlainKronecker(), ng.fisher(models[0], criterion)
    whole = ng.NaturalGradient(models[0], metric, 0.7, structure=structure, damping=damping, rule=rule)
    blocks = ng.StructuredNaturalGradient(models[1], criterion, structure, 0.7, damping=damping, rule=rule, momentum=0)
    for _ in range(3):
        for opt, model in zip((whole, blocks), models, strict=True):
            train(opt, model, 1, x, y)
        assert_close(flat(models[0]), flat(models[1]), 1e-9)


@pytest.mark.parametrize("rule", [ng.TrustRegion(1e-3), ng.Momentum(0.9, radius=1e-3)])
def test_a_bound_in_nats_holds_in_blocks(rule: ng.Rule):
    model = net()
    opt = ng.kfac(model, CE, rule=rule, estimate=ng.ExactLabels(), update_every=1)
    metric = ng.fisher(model, CE)
    for _ in range(4):
        operator, before = metric.at(ng.trainable(model), X), flat(model)
        train(opt, model, 1)
        move = flat(model) - before
        assert 0 < 0.5 * move @ operator.mv(move) <= 1e-3 * (1 + 1e-9)


def test_a_line_search_in_blocks_lowers_the_loss_of_its_batch():
    model = net()
    losses = train(ng.kfac(model, CE, 300.0, rule=ng.LineSearch(backtracks=20), momentum=0.0), model, 6)
    assert all(after < before for before, after in pairwise(losses))


def test_a_rule_that_a_flow_cannot_serve_is_refused_at_the_door():
    for rule in (ng.SubspaceSearch(), ng.LineSearch(iterates=True)):
        words = r"needs the search space of an iterative solver: use ng\.NaturalGradient"
        with pytest.raises(ValueError, match=words):
            ng.kfac(net(), CE, rule=rule)
    model = net()
    with pytest.raises(ValueError, match=r"shapes the directions of layers: use ng\.kfac"):
        ng.NaturalGradient(model, ng.fisher(model, CE), rule=Spectral())


def test_bounds_belong_to_the_rule_that_has_them():
    opt = ng.kfac(net(), CE, rule=ng.MeasuredLength(max_kl=0.2, kl_share=0.1))
    assert (opt.param_groups[0]["max_kl"], opt.param_groups[0]["kl_share"]) == (0.2, 0.1)
    with pytest.raises(ValueError, match=r"max_kl.*are settings of rule=ng\.MeasuredLength"):
        ng.kfac(net(), CE, rule=ng.Rate(), max_kl=0.1)
    assert ng.kfac(net(), CE, rule=ng.Momentum()).param_groups[0]["momentum"] == 0  # one momentum, not two


# directions that a rule shapes


@dataclass(frozen=True)
class Spectral(ng.Rule):
    """Steps of a fixed size in the operator norm of each layer, in the coordinates of its inputs: a sketch of one."""

    rate: float = 0.05

    needs_form = False

    def prepare(self, metric: ng.Operator, level: float) -> dict[str, Tensor]:
        if not isinstance(metric, ng.operators.KroneckerOperator):
            return {}
        values, vectors = torch.linalg.eigh(metric.right)
        return {"root": (vectors * (values.clamp(min=0) + 1e-3).rsqrt()) @ vectors.mT}

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        count = block.memory.get("count", torch.zeros(())) + 1
        if "root" not in block.prepared:
            return block.mean.sign(), {"count": count}
        left, _, right = torch.linalg.svd(block.mean @ block.prepared["root"], full_matrices=False)
        return (left @ right) @ block.prepared["root"], {"count": count}

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        return model.proposal.scale_by(self.rate), memory


def test_a_rule_shapes_the_direction_of_every_block():
    model = net()
    opt = ng.kfac(model, CE, rule=Spectral(), momentum=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = train(opt, model, 1)
    for block in blocks_of(opt):
        root = block.prepared["root"]
        move = block.layout.join({n: p.detach() - before[n] for n, p in model.named_parameters()})
        sizes = torch.linalg.svdvals(move[0] @ torch.linalg.inv(root)) / 0.05
        assert_close(sizes[: torch.linalg.matrix_rank(move[0])].max(), torch.ones((), dtype=F64), 1e-6)
    assert train(opt, model, 20)[-1] < first[0]
    assert opt.state_report().failures == 0
    counts = [count for stack in state_of(opt).stacks.parts for count in stack.memory["count"].tolist()]
    assert counts == [21] * len(blocks_of(opt))


@pytest.mark.parametrize("options", [{"rule": Spectral(), "momentum": 0.5}, {"rule": ng.Momentum(0.9, radius=0.01)}])
def test_what_a_rule_remembers_of_blocks_is_saved(options: dict[str, Any]):
    model, other = net(), net()
    opt, again = (ng.kfac(m, CE, **options) for m in (model, other))
    train(opt, model, 6)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    assert train(again, other, 3) == train(opt, model, 3)
    assert torch.equal(flat(model), flat(other))
