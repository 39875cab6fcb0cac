"""Resuming with the tools that people train with: new objects that load a checkpoint end where the run itself did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_packages import declare_image_operators
from models import draw
from optim_models import CE, flat
from spectral_points import draw_layers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad as ng

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs; sent between test processes, they would be imported there


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def need(package: str) -> Any:
    declare_image_operators()
    return pytest.importorskip(package)


def draw_net() -> nn.Module:
    return draw_layers(4, 6, 3, dtype=torch.float32)


def load_batches() -> DataLoader[Any]:
    x = draw(32, 4).float()
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()), 8)


def test_transformers_trainer_goes_on_from_its_checkpoint():
    transformers = need("transformers")
    need("accelerate")
    rows = [{"input_ids": torch.arange(i, i + 8) % 11, "labels": torch.tensor(i % 3)} for i in range(32)]
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    plain = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0}

    def run(resume: str | None) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=11, max_position_embeddings=8, num_labels=3, **small)
        model = transformers.BertForSequenceClassification(config)
        opt = ng.kfac(model, CE, outputs=lambda out: out.logits)
        arguments = transformers.TrainingArguments(
            "runs", max_steps=4, per_device_train_batch_size=8, save_strategy="steps", save_steps=2, **plain
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,
            optimizers=(opt, None),
            compute_loss_func=ng.callbacks.trainer_loss(opt),
        )
        trainer.train(resume_from_checkpoint=resume)
        return flat(model), opt.state_report().step

    end, steps = run(None)
    again, counted = run("runs/checkpoint-2")
    assert steps == counted == 4
    assert torch.equal(end, again)


def test_accelerate_loads_the_state_that_it_saved():
    accelerate = need("accelerate")

    def build() -> tuple[Any, Any, nn.Module, Any]:
        accelerator, net = accelerate.Accelerator(cpu=True), draw_net()
        opt = ng.hessian_free(net, CE)
        return accelerator, opt, *accelerator.prepare(net, opt)

    def train(accelerator: Any, opt: Any, model: nn.Module, prepared: Any) -> Tensor:
        for inputs, targets in load_batches():
            accelerator.backward(opt.loss(model(inputs), targets))
            prepared.step()
            prepared.zero_grad()
        return flat(model)

    first = build()
    train(*first)
    first[0].save_state("saved")
    end = train(*first)
    fresh = build()
    for parts in (first, fresh, first, fresh):  # the same objects, and new ones, again and again
        parts[0].load_state("saved")
        assert torch.equal(train(*parts), end)


@pytest.mark.parametrize(("recipe", "by_hand"), [(ng.kfac, False), (ng.hessian_free, True)])
def test_lightning_fits_on_from_a_checkpoint(recipe, by_hand):
    L = need("lightning")

    class Classifier(L.LightningModule):
        automatic_optimization = not by_hand

        def __init__(self) -> None:
            super().__init__()
            self.net = draw_net()

        def configure_optimizers(self) -> Any:
            opt = recipe(self.net, CE)
            return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)}

        def training_step(self, batch: Any, index: int) -> Any:
            opt = self.optimizers()
            loss = opt.loss(self.net(batch[0]), batch[1])
            if not by_hand:
                return loss
            opt.zero_grad()
            self.manual_backward(loss)
            return opt.step()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}

    def run(epochs: int, checkpoint: str | None = None, save: str | None = None) -> Tensor:
        trainer, model = L.Trainer(max_epochs=epochs, enable_model_summary=False, **quiet), Classifier()
        trainer.fit(model, load_batches(), ckpt_path=checkpoint)
        if save is not None:
            trainer.save_checkpoint(save)
        return flat(model)

    run(1, save="one.ckpt")
    assert torch.equal(run(2), run(2, checkpoint="one.ckpt"))


def test_ignite_loads_its_objects():
    ignite = need("ignite.engine")
    handlers = need("ignite.handlers")

    def build() -> dict[str, Any]:
        model = draw_net()
        opt = ng.kfac(model, CE)
        return {"model": model, "optimizer": opt, "trainer": ignite.create_supervised_trainer(model, opt, opt.loss)}

    parts = build()
    saver = handlers.Checkpoint(parts, handlers.DiskSaver("saved", create_dir=True), n_saved=None)
    parts["trainer"].add_event_handler(ignite.Events.EPOCH_COMPLETED, saver)
    parts["trainer"].run(load_batches(), max_epochs=2)
    end, first = flat(parts["model"]), min(Path("saved").iterdir())
    fresh = build()
    for _ in range(2):
        handlers.Checkpoint.load_objects(fresh, torch.load(first, weights_only=True))
        fresh["trainer"].run(load_batches(), max_epochs=2)
        assert fresh["trainer"].state.iteration == 8
        assert torch.equal(flat(fresh["model"]), end)


@pytest.mark.parametrize(("recipe", "finished"), [(ng.kfac, True), (ng.hessian_free, False)])
def test_skorch_goes_to_other_processes_and_loads_its_parameters(recipe, finished):
    """As `GridSearchCV(n_jobs=2)` sends an estimator, and `cross_validate` one back that was fitted."""
    x, y = load_batches().dataset.tensors  # type: ignore[attr-defined]
    net = natural_classifier(recipe)
    if finished:
        net.fit(x, y)
    cloudpickle = need("cloudpickle")  # which loky takes, for classes of a script
    other = cloudpickle.loads(cloudpickle.dumps(net))
    for estimator in (net, other):
        torch.manual_seed(0)
        estimator.partial_fit(x, y)
    assert other.optimizer_.model is other.module_
    assert torch.equal(flat(net.module_), flat(other.module_))
    files = {"f_params": "net.pt", "f_optimizer": "opt.pt"}
    net.save_params(**files)
    net.partial_fit(x, y)
    end, fresh = flat(net.module_), natural_classifier(recipe).initialize()
    for estimator in (net, fresh, net, fresh):
        estimator.load_params(**files)
        estimator.partial_fit(x, y)
        assert torch.equal(flat(estimator.module_), end)


def natural_classifier(recipe: Callable[..., Any]) -> Any:
    skorch = need("skorch")

    class NaturalClassifier(skorch.NeuralNetClassifier):
        def initialize_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            self.optimizer_ = recipe(self.module_, self.criterion_, lr=self.lr)
            return self

        def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Any:
            return self.optimizer_.loss(y_pred, y_true)

    return NaturalClassifier(
        draw_net, criterion=nn.CrossEntropyLoss, lr=1.0, batch_size=8, train_split=None, verbose=0, max_epochs=1
    )
