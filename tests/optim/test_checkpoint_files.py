"""Files of checkpoints: whole or not written, and refused where they are damaged, newer, or of something else."""

from __future__ import annotations

import copy
import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from models import build_seeded
from optim_models import CE, flat, net, same, snapshot, train, train_numbered
from process_ranks import call_apart
from saved_runs import BUILDS as RUNS
from saved_runs import load, save
from torch import nn

import natgrad as ng
from natgrad.ground.state_files import FORMAT

BUILDS: dict[str, Any] = {
    "kfac": lambda model: ng.kfac(model, CE, lr=0.3),
    "hessian_free": lambda model: ng.hessian_free(model, CE),
}


def train_net(build: str, steps: int = 3) -> tuple[nn.Module, Any]:
    model = net()
    opt = BUILDS[build](model)
    train(opt, model, steps)
    return model, opt


def save_run(path: Path) -> tuple[nn.Module, Any]:
    """A run, and its checkpoint in a file."""
    model, opt = train_net("kfac")
    ng.save_checkpoint(path, model=model, optimizer=opt)
    return model, opt


def dropout_net() -> nn.Module:
    """Masks from the global generator, statistics in buffers."""
    return build_seeded(
        lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))
    )


NAMES = {"hessian_free": dropout_net, "sampled": net, "averaged": net, "ekfac": dropout_net}


def resume_all(folder: str, threads: int) -> None:
    """The other process, with another past: three more steps of everything, as a user would go on."""
    torch.set_num_threads(threads)  # bit for bit is for as many as the first process had
    torch.manual_seed(12345)
    for name, make in NAMES.items():
        model = make()
        opt = RUNS[name](model)
        saved = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        load(model, opt, saved)
        torch.set_rng_state(saved["random"])
        train_numbered(model, opt, range(4, 7))
        torch.save(save(model, opt), Path(folder) / f"{name}.resumed.pt")


def test_save_load_in_a_new_process_and_continue_is_never_having_stopped(tmp_path: Path) -> None:
    straight = {}
    for name, make in NAMES.items():
        torch.manual_seed(1)
        model = make()
        opt = RUNS[name](model)
        train_numbered(model, opt, range(4))
        torch.save(save(model, opt) | {"random": torch.get_rng_state()}, tmp_path / f"{name}.pt")
        train_numbered(model, opt, range(4, 7))
        straight[name] = save(model, opt)
    call_apart(__name__, "resume_all", str(tmp_path), torch.get_num_threads())
    for name, expected in straight.items():
        assert same(torch.load(tmp_path / f"{name}.resumed.pt", weights_only=True), expected), name


@pytest.mark.parametrize("build", BUILDS)
def test_a_run_goes_on_from_its_file_bit_for_bit(build: str, tmp_path: Path):
    model, opt = train_net(build)
    ng.save_checkpoint(tmp_path / "run.pt", model=model, optimizer=opt)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    twin, other = train_net(build, steps=1)
    ng.load_checkpoint(tmp_path / "run.pt", model=twin, optimizer=other)
    assert train(opt, model, 3) == train(other, twin, 3)
    assert torch.equal(flat(model), flat(twin))
    assert same(opt.state_dict(), other.state_dict())


def test_a_file_that_is_damaged_or_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path):
    path = tmp_path / "run.pt"
    model, opt = save_run(path)
    whole, (twin, other) = path.read_bytes(), train_net("kfac", steps=1)
    before = snapshot(opt), snapshot(other)
    with pytest.raises(ValueError, match="'optimizer' is that of another"):
        ng.load_checkpoint(path, model=twin, optimizer=ng.diagonal(twin, CE))
    with pytest.raises(ValueError, match=r"lacks .'scheduler'"):
        ng.load_checkpoint(path, model=twin, scheduler=other)
    for data in (*(whole[:k] for k in (0, 1, 100, len(whole) // 2, len(whole) - 1)), b"\x00" * len(whole), b"text"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="no whole checkpoint"):
            ng.load_checkpoint(path, model=model, optimizer=opt)
    torch.save(torch.ones(3), path)
    with pytest.raises(ValueError, match="holds a Tensor"):
        ng.load_checkpoint(path, model=model, optimizer=opt)
    with pytest.raises(FileNotFoundError):
        ng.load_checkpoint(tmp_path / "none.pt", model=model, optimizer=opt)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        ng.save_checkpoint(tmp_path / "none" / "run.pt", model=model)
    assert same((snapshot(opt), snapshot(other)), before)


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """Sets how many bytes a file may have, as on a disk that has no more room."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_file_before(tmp_path: Path, full_disk: Any):
    path = tmp_path / "run.pt"
    model, opt = save_run(path)
    whole = path.read_bytes()
    train(opt, model, 1)
    for size in (10, len(whole) // 2):
        full_disk(size)
        with pytest.raises(OSError, match=r"File too large|could not be written"):
            ng.save_checkpoint(path, model=model, optimizer=opt)
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_threads_that_save_to_one_path_leave_the_file_of_one_of_them(tmp_path: Path):
    path, models = tmp_path / "run.pt", [nn.Linear(100, 100) for _ in range(3)]
    for value, model in enumerate(models):
        nn.init.constant_(model.weight, value)
    barrier = Barrier(len(models))

    def save_often(model: nn.Module) -> None:
        for _ in range(10):
            barrier.wait(30)
            ng.save_checkpoint(path, model=model)

    with ThreadPoolExecutor(len(models)) as threads:
        assert list(threads.map(save_often, models)) == [None] * len(models)  # an error would be raised here
    twin = nn.Linear(100, 100)
    ng.load_checkpoint(path, model=twin)
    assert len(twin.weight.unique()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def save_half(path: str, end: str) -> None:
    """In a process of its own: half a checkpoint, and no more; it is killed once there is a file at `end`."""

    def write(state: Any, file: Any) -> None:
        file.write(b"half")
        file.flush()
        while not Path(end).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = write
    ng.save_checkpoint(path, model=nn.Linear(2, 2))


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path):
    path, model, end = tmp_path / "run.pt", nn.Linear(2, 2), tmp_path / "end"
    ng.save_checkpoint(path, model=model)
    others = [tmp_path / name for name in ("run.pt.best.part", "other.pt.1.part", "run.pt.1.part.txt")]
    for other in others:
        other.touch()
    kept = {"run.pt", *(other.name for other in others)}
    with ThreadPoolExecutor(1) as thread:
        writer = thread.submit(call_apart, __name__, "save_half", str(path), str(end))
        try:
            while not (parts := {file.name for file in tmp_path.iterdir() if file.read_bytes() == b"half"}):
                time.sleep(0.01)
                assert not writer.done(), writer.exception()
            (part,) = parts
            ng.save_checkpoint(path, model=model)
            assert (tmp_path / part).read_bytes() == b"half"
        finally:
            end.touch()
        with pytest.raises(RuntimeError, match=f"ended with the exit code -{signal.SIGKILL}"):
            writer.result()
    end.unlink()
    assert (tmp_path / part).exists()
    ng.load_checkpoint(path, model=nn.Linear(2, 2))
    ng.save_checkpoint(path, model=model)
    assert {file.name for file in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("build", BUILDS)
def test_the_format_of_a_newer_version_is_refused_and_nothing_changes(build: str):
    _, opt = train_net(build)
    state = copy.deepcopy(opt.state_dict())
    assert state["natgrad"]["format"] == FORMAT
    text, *tensors = state["param_groups"][0]["natgrad"]
    newer = text.replace(f'["format", {FORMAT}]', f'["format", {FORMAT + 1}]')
    assert newer != text
    state["param_groups"][0]["natgrad"] = (newer, *tensors)
    state["natgrad"]["format"] = FORMAT + 1
    before = snapshot(opt)
    with pytest.raises(ValueError, match=f"format {FORMAT + 1}, this version"):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)


def test_the_checkpoint_of_a_search_is_refused_where_it_is_damaged_or_newer(tmp_path: Path):
    path = tmp_path / "search.pt"

    def search() -> Any:
        return ng.minimize(lambda x: (x**2).sum(), torch.ones(2), 0.5, maxfevals=60, checkpoint=path)

    search()
    state = torch.load(path, weights_only=True)
    assert state["format"] == FORMAT
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no whole checkpoint"):
        search()
    torch.save({**state, "format": FORMAT + 1}, path)
    with pytest.raises(ValueError, match="install the version that wrote it"):
        search()
