"""Where other libraries crash, skip a parameter or count wrongly: packed sequences, odd layers, exceptions, leaks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_state import readings
from models import Assembled, assert_close, build_seeded, draw, pair
from optim_models import CE, X, Y, count_hooks, flat, iterate, net
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng
from natgrad.structures import Estimate, Outputs

LABELS = torch.tensor([0, 2, 1, 1, 0, 2])


# packed sequences


def build_packed(build: Callable[..., Any], packs: bool = True, **choices: Any) -> nn.Module:
    """A recurrent module on packed sequences, then a mean over each one's steps: (b, t, 3), lengths (b,) -> (b, 3).

    packs: False for the same on whole sequences of one length, where lengths do not count.
    """

    def run(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = batch
        if not packs:
            return m.out(torch.tanh(m.inner(x)[0].mean(1)))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(m.inner(packed)[0], batch_first=True)
        return m.out(torch.tanh(found.sum(1) / lengths.unsqueeze(1)))

    inner = build(3, choices.pop("hidden_size", 2), batch_first=True, **choices)
    return Assembled(run, inner=inner, out=nn.Linear(4 if choices.get("bidirectional") else 2, 3))


PACKED: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: build_packed(nn.RNN),
    "lstm, two layers": lambda: build_packed(nn.LSTM, num_layers=2),
    "lstm, projected": lambda: build_packed(nn.LSTM, hidden_size=4, proj_size=2),
    "gru, both ways": lambda: build_packed(nn.GRU, bidirectional=True),
}


class AllDraws(Estimate):
    """Every way in which `Sampled` could draw the labels of all examples at once, as often as it would."""

    def cotangents(self, outputs: Outputs, generator: torch.Generator) -> Iterator[Tensor]:
        """One per joint draw, weighted by the root of its probability."""
        log_p, family = outputs.tree.log_softmax(-1), ng.Categorical()
        for labels in itertools.product(range(3), repeat=len(log_p)):
            drawn = torch.tensor(labels)
            probability = log_p.gather(1, drawn.unsqueeze(1)).sum().exp()
            yield (probability * outputs.weights).sqrt().unsqueeze(1) * family.score(outputs.tree, drawn)


def squares_by_example(model: nn.Module, x: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """The Fisher's diagonal by definition: every example alone, every label."""
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i, length in enumerate(lengths):
        log_p = model((x[i : i + 1, :length], lengths[i : i + 1])).log_softmax(1)[0]
        for value in log_p:
            slopes = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            for name, slope in zip(found, slopes, strict=True):
                found[name] += value.detach().exp() * slope.square() / len(x)
    return found


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_of_different_lengths_count_by_example(name: str):
    # six rows for three examples: by number alone, they could be two steps of each
    model, x, lengths = build_seeded(PACKED[name]), draw(3, 3, 3), torch.tensor([2, 3, 1])
    structure, params = ng.Diagonal(), ng.trainable(model)
    opt = ng.diagonal(model, CE, estimate=AllDraws())
    reading = readings(opt, model, (x, lengths), LABELS[:3])
    expected = squares_by_example(model, x, lengths)
    assert {n for one in reading.layers for n in one.layer.layout.names} == set(params)
    for one in reading.layers:
        squares = structure.operator(one.layer, structure.statistics(one, None, 0.0), 1.0).diagonal()
        parts = one.layer.layout.split(squares.view(one.layer.layout.matrix_shape))
        for key, part in parts.items():
            assert_close(part.view_as(params[key]), expected[key], 1e-12)


def test_packed_sequences_of_one_length_are_read_as_whole_ones():
    for build in (nn.RNN, nn.LSTM, nn.GRU):
        models = [build_seeded(lambda build=build, packs=packs: build_packed(build, packs)) for packs in (True, False)]
        batch = draw(4, 3, 3), torch.full((4,), 3)
        found, expected = (readings(ng.kfac(m, CE), m, batch, LABELS[:4]).layers for m in models)
        by_key = {one.key: one for one in found}
        assert by_key.keys() == {one.key for one in expected}
        for one in expected:
            assert not by_key[one.key].pooled
            assert_close(by_key[one.key].activations, one.activations, 1e-13)
            assert_close(by_key[one.key].deltas[0], one.deltas[0], 1e-12, scale=one.deltas[0].abs().max())


# layers


def build_resized() -> nn.Module:
    """A transposed convolution that is told its output's size: its padding differs from call to call."""
    return Assembled(
        lambda m, x: m.out(torch.tanh(m.inner(x, output_size=[10, 10])).mean((2, 3))),
        inner=nn.ConvTranspose2d(2, 2, 3, stride=2),
        out=nn.Linear(2, 3),
    )


def build_masked() -> nn.Module:
    """Attention that leaves out padding, without its weights: the fused kernel. (b, t, 4) -> (b, 3)."""

    def run(m: Any, x: Tensor) -> Tensor:
        absent = torch.zeros(x.shape[:2], dtype=torch.bool).index_fill(1, torch.tensor([2]), True)
        return m.out(m.inner(x, x, x, key_padding_mask=absent, need_weights=False)[0].mean(1))

    return Assembled(run, inner=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 3))


def build_overwritten() -> nn.Module:
    """A layer whose outputs are changed in place, and that is used again on what they became."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.inner(x)
        hidden += x
        return m.out(m.inner(hidden.relu_()).tanh_())

    return Assembled(run, inner=nn.Linear(4, 4), out=nn.Linear(4, 3))


def build_named() -> nn.Module:
    """A layer that is called by keyword: nobody hears the call, but its product is found in the graph."""
    return Assembled(lambda m, x: m.out(torch.tanh(m.inner(input=x))), inner=nn.Linear(4, 4), out=nn.Linear(4, 3))


def images(*layers: nn.Module, width: int) -> nn.Module:
    """These layers, and a classifier of `width` features."""
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(width, 3))


IMAGE, TOKENS = draw(6, 2, 4, 4), torch.tensor([[0, 1], [2, 2], [4, 0], [3, 1], [1, 4], [0, 3]])
# model, inputs, and the parameters that fall back on their diagonal
ODD: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str]]] = {
    "groups": (lambda: images(nn.Conv2d(2, 4, 3, groups=2), width=16), IMAGE, set()),
    "depthwise": (lambda: images(nn.Conv2d(2, 2, 3, groups=2), width=8), IMAGE, set()),
    "dilation": (lambda: images(nn.Conv2d(2, 3, 2, dilation=2), width=12), IMAGE, set()),
    "padding='same'": (lambda: images(nn.Conv2d(2, 3, 3, padding="same", dilation=2), width=48), IMAGE, set()),
    "conv1d": (lambda: images(nn.Conv1d(2, 3, 2), width=9), IMAGE[..., 0], set()),
    "conv3d": (lambda: images(nn.Conv3d(2, 3, 2), width=27), draw(6, 2, 2, 4, 4), set()),
    "channels last": (
        lambda: images(nn.Conv2d(2, 3, 3), width=12), IMAGE.to(memory_format=torch.channels_last), set(),
    ),
    "batch norm": (lambda: images(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), width=12), IMAGE, set()),
    "instance norm": (
        lambda: images(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), width=12), IMAGE, {"1.weight", "1.bias"},
    ),
    "output size": (build_resized, IMAGE, {"inner.weight", "inner.bias"}),
    "learned slopes": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 3), nn.PReLU(3), nn.Linear(3, 3)), IMAGE, {"2.weight"},
    ),
    "bags of tokens": (lambda: images(nn.EmbeddingBag(5, 4), width=4), TOKENS, {"0.weight"}),
    "bounded embedding": (lambda: images(nn.Embedding(5, 2, max_norm=1.0), width=4), TOKENS, set()),
    "embedding by frequency": (
        lambda: images(nn.Embedding(5, 2, scale_grad_by_freq=True), width=4), TOKENS, {"0.weight"},
    ),
    "masked attention": (build_masked, draw(6, 3, 4), set()),
    "changed in place": (build_overwritten, draw(6, 4), set()),
    "called by keyword": (build_named, draw(6, 4), {"inner.bias"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, ng.kfac) for name in ODD), *pair([*ODD][::3], [ng.unitwise, ng.online_ng])]
)
def test_odd_layers_are_trained_and_what_is_not_known_gets_its_diagonal(name: str, recipe: Callable[..., Any]):
    build, inputs, unknown = ODD[name]
    model = build_seeded(build)
    start, opt = {n: p.detach().clone() for n, p in model.named_parameters()}, recipe(model, CE)
    losses = [float(iterate(opt, model, inputs, LABELS)) for _ in range(4)]
    assert min(losses) < losses[0]
    # the bias before a batch norm has no gradient but rounding
    still = {n for n, p in model.named_parameters() if torch.equal(p, start[n])}
    assert still <= ({"0.bias"} if name in ("batch norm", "instance norm") else set())
    assert opt.state_report().failures == 0
    if recipe is ng.kfac:
        assert {row.parameter for row in opt.report() if row.structure == "Diagonal"} == unknown


# scale


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal])
def test_the_step_does_not_depend_on_the_length_of_sequences(recipe: Callable[..., Any]):
    def step(times: int) -> Tensor:
        model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)))
        opt = recipe(model, CE, estimate=ng.ExactLabels())
        x, y = draw(4, 2, 3).repeat(1, times, 1), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 0]]).repeat(1, times)
        opt.loss(model(x).transpose(1, 2), y).backward()
        opt.step()
        return flat(model)

    assert_close(step(3), step(1), 1e-9)


def test_optimizers_leave_nothing_behind():
    def count_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    model = net()
    iterate(ng.kfac(model, CE), model)
    before, died = count_tensors(), []
    for _ in range(20):
        opt = ng.kfac(model, CE)
        opt.loss(model(X), Y)  # never goes backward
        died.append(weakref.ref(opt))
    del opt
    assert count_tensors() <= before
    assert all(one() is None for one in died)
    assert count_hooks(model) == 0
