"""What an example is: every structure agrees with the metric's definition, wherever the model puts its examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import blocks_of, metric_of
from models import F64, Assembled, assert_close, build_seeded, draw, reference_jacobian
from optim_models import flat, is_finite, iterate, train
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.layers.examples import Examples, KnownPlaces, alternating, consecutive
from natgrad.operators import Arranged
from natgrad.optim import StructuredNaturalGradient
from natgrad.structures import Empirical, ExactLabels, Layerwise

E, H = 4, 3


def build_head(body: nn.Module, first: bool, pool: bool = False) -> nn.Module:
    """Something over positions, then outputs; `first`: examples come first."""

    def run(m: Any, x: Tensor) -> Tensor:
        found = take_first(m.body(x))
        return m.out(found.mean(1 if first else 0) if pool else found)

    return Assembled(run, body=body, out=nn.Linear(E, 3))


class Running(nn.Module):
    """A layer and a sum over time."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.axis = nn.Linear(E, E), nn.LayerNorm(E), int(first)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.inner(x)).cumsum(self.axis))


def encoder(first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(E, 2, 5, dropout=0.0, batch_first=first)


def take_first(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def build_attention(first: bool) -> nn.Module:
    attention = nn.MultiheadAttention(E, 2, batch_first=first)
    return Assembled(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=attention)


def build_turned() -> nn.Module:
    """Examples first outside, second within: mixed layouts."""
    parts = {"before": nn.Linear(E, E), "inner": nn.RNN(E, E), "after": nn.Linear(E, E)}
    return Assembled(lambda m, x: m.after(m.inner(m.before(x).transpose(0, 1))[0].transpose(0, 1)), **parts)


def build_flattened() -> nn.Module:
    """Positions and examples as one dimension within, (t b, d)."""
    run = lambda m, x: m.mix(torch.tanh(m.inner(x.flatten(0, 1))).view(x.shape))  # noqa: E731
    return Assembled(run, inner=nn.Linear(E, E), mix=Running(False))


BODIES: dict[str, Callable[[bool], nn.Module]] = {
    "LSTM": lambda first: nn.LSTM(E, E, batch_first=first),
    "GRU, two layers": lambda first: nn.GRU(E, E, num_layers=2, batch_first=first),
    "attention": build_attention,
    "encoder": encoder,
    "running sum": Running,
}
FIRST, SECOND = ("GRU, two layers", "encoder", "running sum"), ("LSTM", "attention", "encoder", "running sum")
MODELS = {
    **{f"{n}, examples second": (lambda build=BODIES[n]: build_head(build(False), False)) for n in SECOND},
    **{f"{n}, examples first": (lambda build=BODIES[n]: build_head(build(True), True)) for n in FIRST},
    "pooled, examples second": lambda: build_head(encoder(False), False, pool=True),
    "pooled, examples first": lambda: build_head(encoder(True), True, pool=True),
    "turned": lambda: build_head(build_turned(), True),
    "flattened": lambda: build_head(build_flattened(), False),
}
SIZES = [(2, 3), (3, 3), (3, 2)]  # also as many positions as examples


def definition(model: nn.Module, criterion: nn.Module | ng.Likelihood, x: Tensor) -> Tensor:
    """E[J^T M J] from one plain backward pass per output."""
    family = ng.families.as_criterion(criterion).family
    jacobian = reference_jacobian(model, {}, x, family.rows)
    root = family.root(family.rows(model(x).detach()))
    found = torch.einsum("ima,imq->iqa", jacobian, root).flatten(0, 1)
    return found.mT @ found / len(root)


def blocks_error(arranged: Arranged, expected: Tensor, diagonal: bool) -> float:
    """The largest difference where the structure says something, relative to the largest entry."""
    found = arranged.dense()
    if diagonal:
        found, expected = found.diagonal(), expected.diagonal()
    told = found != 0
    return float(((found - expected) * told).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_exact_structures_are_the_definition_wherever_examples_are(name):
    model = build_seeded(MODELS[name])
    params, metric = ng.trainable(model), ng.fisher(model, ng.Categorical())
    for size in SIZES if "running" in name else SIZES[1:2]:
        x = draw(*size, E, seed=5)
        expected = definition(model, ng.Categorical(), x)
        for structure in (ng.Diagonal(estimate=ExactLabels()), ng.UnitWise(estimate=ExactLabels())):
            found = structure.update(None, metric, params, x)[0]
            assert blocks_error(found, expected, False) < 1e-10, structure
        found = ng.EigenKronecker(estimate=ExactLabels()).update(None, metric, params, x)[0]
        assert_close(found.trace(), expected.trace(), 1e-10)


@pytest.mark.parametrize(
    ("name", "criterion"),
    [
        ("LSTM, examples second", ng.Gaussian()),
        ("encoder, examples second", ng.Gaussian()),
        ("encoder, examples first", ng.Gaussian()),
        ("encoder, examples second", nn.MSELoss()),
        ("encoder, examples first", ng.Bernoulli()),
    ],
)
def test_entrywise_outputs_are_told_apart_too(name, criterion):
    """A row of ng.Gaussian() on (t, b, m) holds all examples of a time."""
    model, x = build_seeded(MODELS[name]), draw(3, 2, E, seed=5)
    params, metric = ng.trainable(model), ng.fisher(model, criterion)
    expected = definition(model, criterion, x)
    for structure in (ng.Diagonal(estimate=ExactLabels()), ng.UnitWise(estimate=ExactLabels())):
        assert blocks_error(structure.update(None, metric, params, x)[0], expected, False) < 1e-10


def read_diagonal(model: nn.Module, structure: Layerwise, x: Tensor, criterion: nn.Module | None = None) -> Tensor:
    """The diagonal that an optimizer has after one reading, in the order of the parameters."""
    optimizer = StructuredNaturalGradient(model, criterion or nn.MSELoss(), structure)
    outputs = model(x)
    classes = isinstance(criterion, nn.CrossEntropyLoss)
    optimizer.loss(outputs, torch.zeros_like(outputs.movedim(1, -1)[..., 0].long() if classes else outputs)).backward()
    found = {}
    for block in blocks_of(optimizer):
        matrix = metric_of(optimizer, block).diagonal().view(block.layout.matrix_shape)
        found |= block.layout.split(matrix)
    optimizer.detach()
    return torch.cat([found[name].reshape(-1) for name, _ in model.named_parameters()]).to(F64)


SINGLE = {
    "each position by itself": lambda: nn.Linear(E, 3),
    "running sum": MODELS["running sum, examples first"],
    "flattened outputs": lambda: nn.Sequential(MODELS["running sum, examples first"](), nn.Flatten(0, 1)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_batch_of_a_single_example_has_one_score(name):
    """The square of the sum over its positions, as with more examples."""
    model, x = build_seeded(SINGLE[name]), draw(1, 3, E, seed=5)
    outputs = model(x)
    score = torch.autograd.grad(outputs.square().sum(), [*model.parameters()])
    expected = torch.cat([part.reshape(-1) for part in score]).square() / outputs.numel()
    assert_close(read_diagonal(model, ng.Diagonal(estimate=Empirical()), x), expected, 1e-10)


def build_function(run: Callable[[Any, Tensor], Tensor], *shapes: tuple[int, ...]) -> nn.Module:
    """A function of parameters that are no module's own."""
    return Assembled(run, p=nn.ParameterList([nn.Parameter(draw(*shape, seed=i)) for i, shape in enumerate(shapes)]))


def run_packed(m: Any, x: Tensor) -> Tensor:
    """Two sequences, of three positions and of one, step after step."""
    lengths = (x != 0).any(-1).sum(1)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return m.inner(packed)[0].data


UNCLEAR: dict[str, Callable[[], nn.Module]] = {
    "a product of parameters": lambda: build_function(lambda m, x: x @ (m.p[0] @ m.p[1]).mT, (3, 2), (2, E)),
    "beside a matrix": lambda: build_function(lambda m, x: x @ (m.p[0] + m.p[1] @ m.p[2]), (E, 3), (E, 1), (1, 3)),
    "members": lambda: build_function(lambda m, x: torch.vmap(lambda w: (x @ w).tanh())(m.p[0]).mean(0), (3, E, 2)),
    "experts": lambda: build_function(lambda m, x: (x.expand(3, -1, -1) @ m.p[0]).tanh().sum(0), (3, E, 2)),
    "packed positions": lambda: Assembled(run_packed, inner=nn.RNN(E, 2, batch_first=True)),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_empirical_squares_are_sums_over_examples_where_a_layer_does_not_tell_them_apart(name):
    """Two examples with signs: (g + h)^2 and (g - h)^2, whose mean is g^2 + h^2."""
    model, x = build_seeded(UNCLEAR[name]), draw(2, E, seed=5)
    x = torch.stack([draw(3, E, seed=6), functional.pad(x[:1], (0, 0, 0, 2))]) if name == "packed positions" else x
    diagonals = torch.stack([read_diagonal(model, ng.Diagonal(estimate=Empirical(), seed=s), x) for s in range(8)])
    expected = torch.zeros_like(diagonals[0])
    for part in x.split(1):
        score = torch.autograd.grad(model(part).square().sum(), [*model.parameters()])
        expected += torch.cat([each.reshape(-1) for each in score]).square() / model(x).numel()
    assert_close((diagonals.amax(0) + diagonals.amin(0)) / 2, expected, 1e-10)


@pytest.mark.parametrize("structure", [ng.Kronecker, ng.EigenKronecker, ng.OnlineLowRank])
def test_factors_do_not_depend_on_where_examples_are(structure):
    """The same network, batch first or second: the same operator."""
    found = []
    for first in (True, False):
        model, x = build_seeded(MODELS[f"encoder, examples {'first' if first else 'second'}"]), draw(3, 3, E, seed=5)
        inputs = x if first else x.transpose(0, 1).contiguous()
        update = structure(estimate=ExactLabels()).update
        operator = update(None, ng.fisher(model, nn.MSELoss()), ng.trainable(model), inputs)[0]
        found.append(operator.mv(draw(operator.size, seed=1)))
    assert_close(found[1], found[0], 1e-8)


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("partition", [consecutive, alternating])
def test_cotangents_of_a_partition_are_all_columns_one_example_at_a_time(partition, count):
    factor = draw(6, 3, 2)
    examples = partition(count, factor[..., 0])
    found = list(examples.cotangents(factor))
    assert len(found) == 12 // count
    assert_close(torch.stack(found).sum(0), factor.sum(2), 1e-14)
    assert_close(sum(c.square().sum() for c in found), factor.square().sum(), 1e-14)


# examples that meet: in the model, or in the loss


def build_graph() -> nn.Module:
    """Nodes of one graph as rows, (b, d): two dimensions everywhere, and every node sees its neighbours."""

    def run(m: Any, x: Tensor) -> Tensor:
        edges = torch.linspace(0.1, 0.9, len(x) ** 2, dtype=x.dtype).view(len(x), len(x)).softmax(1)
        return m.out(edges @ torch.tanh(m.inner(x)))

    return Assembled(run, inner=nn.Linear(E, E), out=nn.Linear(E, 3))


def build_compared() -> nn.Module:
    """Rows whose features are measured against the batch's."""
    return Assembled(lambda m, x: m.out(m.inner(x).softmax(0)), inner=nn.Linear(E, E), out=nn.Linear(E, 3))


def exchange(body: nn.Module) -> nn.Module:
    """Outputs (t, b, c) as (b, t, c), or the other way round."""
    return Assembled(lambda m, x: m.body(x).transpose(0, 1), body=body)


MEETING = {
    "graph": (build_graph, (4,)),
    "compared": (build_compared, (4,)),
    "encoder, first": (lambda: build_head(encoder(True), True), (2, 3)),
    **{n: (lambda build=BODIES[n]: build_head(build(False), False), (3, 2)) for n in ("LSTM", "running sum")},
    "square": (lambda: build_head(build_attention(False), False), (2, 2)),
    "exchanged": (lambda: exchange(build_head(encoder(True), True)), (2, 3)),
    "exchanged, second": (lambda: exchange(build_head(encoder(False), False)), (2, 2)),
}


@pytest.mark.parametrize("name", MEETING)
def test_examples_that_meet_in_the_model_or_the_loss_are_taken_together(name):
    """The classes of nn.CrossEntropyLoss lie on dimension 1: there, its softmax joins the examples of (t, b, c)."""
    build, size = MEETING[name]
    criterion = (nn.CrossEntropyLoss(), ng.Categorical(), nn.MSELoss())[list(MEETING).index(name) % 3]
    model, x = build_seeded(build), draw(*size, E, seed=5)
    params, metric = ng.trainable(model), ng.fisher(model, criterion)
    expected = definition(model, criterion, x)
    for structure in (ng.Diagonal(estimate=ExactLabels()), ng.UnitWise(estimate=ExactLabels())):
        memory = None
        for _ in range(2):  # the second time it remembers
            found, memory = structure.update(memory, metric, params, x)
            assert blocks_error(found, expected, False) < 1e-10, structure
    found = ng.EigenKronecker(estimate=ExactLabels()).update(None, metric, params, x)[0]
    assert_close(found.trace(), expected.trace(), 1e-10)
    if isinstance(criterion, nn.Module):
        found = read_diagonal(model, ng.Diagonal(estimate=ExactLabels()), x, criterion)
        assert_close(found, expected.diagonal(), 1e-10)


def test_a_head_that_starts_at_zero_hides_no_examples_that_meet():
    model, x = build_seeded(build_graph), draw(4, E, seed=5)
    nn.init.zeros_(model.out.weight)
    params, metric = dict(ng.trainable(model)), ng.fisher(model, nn.CrossEntropyLoss())
    structure = ng.Diagonal(estimate=ExactLabels())
    memory = structure.update(None, metric, params, x)[1]
    with torch.no_grad():
        model.out.weight.copy_(draw(3, E, seed=6))
    found = structure.update(memory, metric, params, x)[0]
    assert blocks_error(found, definition(model, nn.CrossEntropyLoss(), x), False) < 1e-10


# asked on gradients that are not zero, and again


def build_shared(gate: bool, bias: bool = True) -> nn.Module:
    """A layer whose weight is used once more, behind a head or a gate that starts at zero."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.inner(x))
        again = torch.tanh(torch.einsum("bi,oi->bo", hidden, m.inner.weight * 1.0))
        return m.out(hidden + m.gate * again if gate else again)

    inner, out = nn.Linear(E, E, bias=bias), nn.Linear(E, 3)
    if not gate:
        nn.init.zeros_(out.weight)
    return Assembled(run, inner=inner, out=out, gate=nn.Parameter(torch.zeros(())) if gate else None)


@pytest.mark.parametrize(
    ("structure", "gate", "bias"),
    [(ng.Kronecker, True, True), (ng.Kronecker, False, False), (ng.Diagonal, True, False)],
)
def test_a_second_use_that_was_hidden_at_first_is_found(structure, gate, bias):
    model = build_seeded(lambda: build_shared(gate, bias))
    optimizer = StructuredNaturalGradient(model, nn.CrossEntropyLoss(), structure(0.9))
    train(optimizer, model, 1, draw(5, E), torch.tensor([0, 1, 2, 0, 1]))
    assert "inner.weight" in {name for block in blocks_of(optimizer) for name in block.layout.names}
    train(optimizer, model, 8, draw(5, E), torch.tensor([0, 1, 2, 0, 1]))
    held = {block.layer.layout.names for block in blocks_of(optimizer) if block.layer is not None}
    assert not any("inner.weight" in names for names in held)
    assert is_finite(model)


def build_stepped(bare: bool) -> nn.Module:
    """A recurrent matrix that moves no first position: as a product of parameters, or as a layer's one use of two."""

    def run(m: Any, x: Tensor) -> Tensor:
        states = [torch.tanh(x[:, 0] if bare else m.inner(x[:, 0]))]
        weight = m.gain * m.weight if bare else m.inner.weight * 1.0
        for each in x.unbind(1)[1:]:
            states.append(torch.tanh((each if bare else m.inner(each)) + torch.einsum("bi,oi->bo", states[-1], weight)))
        return m.out(torch.stack(states, 1))

    if bare:
        return Assembled(
            run, gain=nn.Parameter(torch.ones(E, 1)), weight=nn.Parameter(torch.randn(E, E)), out=nn.Linear(E, 3)
        )
    return Assembled(run, inner=nn.Linear(E, E, bias=False), out=nn.Linear(E, 3))


@pytest.mark.parametrize("bare", [True, False])
def test_what_the_first_position_does_not_tell_is_heard_from_the_others(bare):
    """Exact labels go backward one position after another."""
    model, x = build_seeded(lambda: build_stepped(bare)), draw(4, 3, E, seed=5)
    count = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("out"))
    expected, structure = definition(model, nn.MSELoss(), x).diagonal(), ng.Diagonal(estimate=ExactLabels())
    operator = structure.update(None, ng.fisher(model, nn.MSELoss()), ng.trainable(model), x)[0]
    assert_close(operator.diagonal()[:count], expected[:count], 1e-10)
    assert_close(read_diagonal(model, structure, x)[:count], expected[:count], 1e-10)


class Mixing(nn.Module):
    """Tokens that see the ones before them by a share of `mix`, and positions that all examples have in common.

    No partition fits all layers: examples meet in the positions, positions in the sum. What comes nearest depends on
    `mix`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(7, E), nn.Embedding(H, E)
        self.inner, self.norm, self.out = nn.Linear(E, E), nn.LayerNorm(E), nn.Linear(E, 7)
        self.mix = 1e-3

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.inner(self.token(tokens) + self.position(torch.arange(H)[None])))
        return self.out((hidden + self.mix * hidden.cumsum(1)).tanh())


def test_places_are_asked_for_once_per_shapes_and_few_are_remembered():
    places, outputs = KnownPlaces(), draw(6, 2)
    labels, calls = consecutive(3, outputs).labels.contiguous(), []

    def ask(shape: int) -> None:
        known = lambda: [Examples(3, labels)] if calls.append(shape) is None else []  # noqa: E731
        examples, _ = places.find(outputs, [], known, [(shape,)], strict=False, afresh=False)
        assert torch.equal(examples.labels, labels)

    for shape in [*range(150), 149]:
        ask(shape)
        assert max(len(places.found), len(places.partitions)) <= 64
    assert all(
        part.labels.untyped_storage().nbytes() == 6 * 8 for part in places.partitions.values()
    )  # rows', not entries'
    places.partitions.clear()  # as after a checkpoint, which has the numbers alone
    ask(149)
    ask(149)
    assert calls == [*range(150), 149]


@pytest.mark.parametrize("structure", [ng.Kronecker, ng.EigenKronecker, ng.Diagonal, ng.UnitWise])
@pytest.mark.parametrize("examples", [H, H + 1])
def test_a_resumed_run_takes_the_examples_for_what_the_run_itself_took(structure, examples):
    tokens, (model, other) = torch.arange(examples * H).view(examples, H) % 7, (build_seeded(Mixing) for _ in range(2))
    optimizer, resumed = (
        StructuredNaturalGradient(m, "token_cross_entropy", structure(0.9), update_every=1) for m in (model, other)
    )
    train(optimizer, model, 2, tokens, tokens)
    other.load_state_dict(model.state_dict())
    model.mix = other.mix = 10.0
    resumed.load_state_dict(optimizer.state_dict())
    assert train(optimizer, model, 2, tokens, tokens) == train(resumed, other, 2, tokens, tokens)
    assert torch.equal(flat(model), flat(other))


# parameters without a layer


def build_bare() -> nn.Module:
    """Weights, gains and shifts that no layer holds."""
    return Assembled(
        lambda m, x: m.out(torch.tanh(torch.einsum("...i,oki->...o", x, m.w) * m.gain.exp() + m.shift)),
        w=nn.Parameter(0.3 * torch.randn(E, 2, E)),
        gain=nn.Parameter(torch.tensor(0.3)),
        shift=nn.Parameter(torch.randn(E)),
        out=nn.Linear(E, 3),
    )


@pytest.mark.parametrize("structure", [ng.Kronecker, ng.Diagonal, ng.OnlineLowRank])
@pytest.mark.parametrize("shape", [(1, E), (5, E), (40, E), (3, 2, E)])
def test_parameters_without_a_layer_get_the_diagonal_over_examples(structure, shape):
    model, x = build_seeded(build_bare), draw(*shape, seed=4)
    count = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("out"))
    expected = definition(model, nn.MSELoss(), x).diagonal()[:count]
    assert_close(read_diagonal(model, structure(estimate=ExactLabels()), x)[:count], expected, 1e-10)


@pytest.mark.parametrize("routed", [[0, 1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
def test_experts_with_as_many_rows_as_there_are_features_do_not_hide_the_examples(routed: list[int]):
    """Eight rows of four features, and four rows for each of two experts: the examples are eight, not four."""
    x, targets, routes = draw(8, 4), draw(8, 2, seed=1), torch.tensor(routed).bool()

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = x.new_zeros(8, 3)
        hidden[routes], hidden[~routes] = m.first(x[routes]), m.second(x[~routes])
        return m.out(hidden.tanh())

    parts = {"first": nn.Linear(4, 3), "second": nn.Linear(4, 3), "out": nn.Linear(3, 2, bias=False)}
    model = Assembled(run, **parts).double()
    opt = ng.unitwise(model, ng.Gaussian(), estimate=ng.Empirical())
    inputs = list[Tensor]()
    model.out.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    errors = (model(x) - targets).detach()
    iterate(opt, model, x, targets)
    block = next(b for b in blocks_of(opt) if b.layout.names == ("out.weight",))
    expected = torch.einsum("bo,bi,bj->oij", errors.square(), inputs[0], inputs[0]) / 8
    assert_close(metric_of(opt, block).dense(), torch.block_diag(*expected), 1e-12)
