"""Scripts of others of which two lines change: the optimiser, and the loss of a batch. Their loops stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

scripts = pytest.importorskip("benchmarks.public_scripts")  # beside the package, not in it

STEPS = 30
FEW = 22  # a rate is told of after twenty
HIDDEN = "a large part of the gradient .* did not come from optimizer.loss"


def read_digits() -> Any:
    images, labels = load_digits(return_X_y=True)
    x, y = scripts.as_images(torch.from_numpy(images).float() / 16), torch.from_numpy(labels)
    return scripts.LabelledImages(x[:1400], y[:1400], x[1400:], y[1400:])


def draw_text(words: int = 24, length: int = 4000) -> Tensor:
    """A walk: each word has one that mostly follows it."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.randint(words, (words, 2), generator=generator)
    sides, word, text = (torch.rand(length, generator=generator) < 0.2).long().tolist(), 0, list[int]()
    for side in sides:
        text.append(word)
        word = int(follows[word, side])
    return torch.tensor(text)


SCRIPTS: dict[str, Callable[[], Any]] = {
    "mnist": lambda: scripts.Mnist(read_digits(), (8, 16), 32),
    "autoencoder": lambda: scripts.Autoencoder(read_digits(), 40, 5),
    "words, tied": lambda: scripts.Words(draw_text(), 12, 2, tied=True),
    "adder": lambda: scripts.Adder(16, 1, 2),
    "characters": lambda: scripts.Characters(draw_text(), 8, 8, 1, 2),
    "graph": scripts.GraphNodes,
}
ALLOWED = {"autoencoder": HIDDEN}  # that its divergence goes past the criterion is said


class Loop:
    """A script in the middle of its run: model, optimiser, scheduler."""

    def __init__(self, script: Any, optimizer: str = "ours", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.script, self.model, self.losses = script, script.build(), list[float]()
        self.opt = getattr(script, optimizer)(self.model)
        falls = isinstance(script, scripts.Mnist)
        self.scheduler = StepLR(self.opt, 10, 0.7) if falls else LambdaLR(self.opt, lambda n: script.fall(n / STEPS))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batches = scripts.draw_batches(self.script, 0, len(self.losses))
            self.losses.append(scripts.take_step(self.script, self.model, self.opt, batches))
            self.scheduler.step()

    def evaluate(self) -> float:
        """As the scripts do in between: in evaluation mode and without gradients; the carried state stays."""
        random, carried = torch.get_rng_state(), getattr(self.script, "hidden", None)
        self.model.eval()
        with torch.no_grad():
            loss = self.script.evaluate(self.model)
        self.model.train()
        torch.set_rng_state(random)
        self.script.hidden = carried
        return loss

    def save(self, path: Path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "opt", "scheduler")}
        carried = getattr(self.script, "hidden", None)
        torch.save({**parts, "losses": self.losses, "hidden": carried, "random": torch.get_rng_state()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        for name in ("model", "opt", "scheduler"):
            getattr(self, name).load_state_dict(saved[name])
        self.losses, self.script.hidden = saved["losses"], saved["hidden"]
        torch.set_rng_state(saved["random"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_lines_of_the_script_change(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    """It learns in as many steps as under its own optimiser, and goes on from a checkpoint bit for bit."""
    loop = Loop(SCRIPTS[name]())
    before = loop.evaluate()
    loop.train(STEPS // 2)
    loop.save(tmp_path / "half.pt")
    loop.evaluate()
    loop.train(5)
    soon = [p.detach().clone() for p in loop.model.parameters()]
    loop.train(STEPS - len(loop.losses))
    report, held_out = loop.opt.state_report(), loop.evaluate()
    assert report.failures == 0
    assert held_out < 0.85 * before
    plain = Loop(SCRIPTS[name](), "own")
    plain.train(STEPS)
    assert held_out < plain.evaluate() + 0.1 * before

    other = Loop(SCRIPTS[name](), seed=1)
    other.load(tmp_path / "half.pt")
    other.train(5)
    assert other.losses == loop.losses[: len(other.losses)]
    assert all(torch.equal(p, q) for p, q in zip(soon, other.model.parameters(), strict=True))
    said = [str(warning.message) for warning in recwarn]
    assert [text for text in said if name not in ALLOWED or "did not come from optimizer.loss" not in text] == []


def write_rates(largest: float) -> list[float]:
    """nanoGPT's loop: rates are written into the groups, and a scaler that does nothing stands in between."""
    torch.manual_seed(0)
    script, losses, scaler = SCRIPTS["characters"](), list[float](), torch.amp.GradScaler("cpu", enabled=False)
    model = script.build()
    opt = script.ours(model)
    for step in range(FEW):
        for group in opt.param_groups:
            group["lr"] = largest * script.fall(step / FEW)
        for batch in scripts.draw_batches(script, 0, step):
            loss = script.loss(model, opt.loss, batch)
            scaler.scale(loss / script.parts).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), script.clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def test_a_rate_of_adam_s_that_was_left_in_the_loop_is_told_once():
    with pytest.warns(
        UserWarning, match=r"lr is 0.000.*, .* the last 20 steps were at least 1\d+ times shorter than at lr=1"
    ) as said:
        losses = write_rates(1e-3)
    assert len(said) == 1
    assert losses[-1] > 0.9 * losses[0]


@pytest.mark.parametrize("how", ["constant", "warm-up"])
def test_small_rates_that_are_meant_are_not_told(how: str):
    loop = Loop(SCRIPTS["graph"]())
    if how == "constant":
        loop.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.opt, 0.02, total_iters=1000)
    else:
        loop.scheduler = LambdaLR(loop.opt, lambda n: (n + 1) / 10_000)
    loop.train(FEW)
