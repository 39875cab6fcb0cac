"""Data sets: what the loaders promise, on small files laid out as the real ones, and the downloads that are kept."""

import gzip
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from small_races import idx

from natgrad_lab import data
from natgrad_lab.data import DataError, cache_folder, hash_file, read_cached


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NATGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NATGRAD_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def fashion(folder):
    place = folder / "fashion-mnist"
    place.mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 6), ("t10k", 3)):
        idx(place / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (n, 4, 5)))
        idx(place / f"{part}-labels-idx1-ubyte.gz", rng.integers(0, 10, n))
    return place


def test_digits_are_fixed_and_in_the_unit_interval():
    first, second = data.digits(), data.digits()
    assert first.train_x.shape == (1437, 8, 8)
    assert first.test_x.shape == (360, 8, 8)
    assert first.train_x.min() == 0
    assert first.train_x.max() == 1
    assert torch.equal(first.train_x, second.train_x)
    assert torch.equal(first.test_y, second.test_y)
    assert first.train_x.dtype == torch.float32
    assert first.train_y.dtype == torch.int64


def test_flat_keeps_rows():
    assert data.digits().flat().test_x.shape == (360, 64)


def test_idx_files_are_read_as_they_were_written(fashion):
    split = data.fashion_mnist()
    raw = data.read_idx(fashion / "train-images-idx3-ubyte.gz")
    assert split.train_x.shape == (6, 4, 5)
    assert split.test_y.shape == (3,)
    torch.testing.assert_close(split.train_x, torch.from_numpy(raw.astype(np.float32)) / 255)


DAMAGES = {
    "not gzip": lambda raw: b"plain bytes",
    "cut short": lambda raw: raw[:-9],
    "wrong type": lambda raw: gzip.compress(b"\x00\x00\x0d" + gzip.decompress(raw)[3:]),
    "header only": lambda raw: gzip.compress(gzip.decompress(raw)[:6]),
    "too few values": lambda raw: gzip.compress(gzip.decompress(raw)[:-1]),
    "empty": lambda raw: gzip.compress(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_idx_file_is_named(fashion, damage):
    path = fashion / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DataError, match=path.name):
        data.fashion_mnist()


def test_files_that_do_not_belong_together(fashion):
    idx(fashion / "train-labels-idx1-ubyte.gz", np.zeros(5))
    with pytest.raises(DataError, match="do not belong together"):
        data.fashion_mnist()


def test_missing_file_in_the_folder_is_named(fashion):
    (fashion / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="lacks train-labels"):
        data.fashion_mnist()


def openml(monkeypatch, answer):
    monkeypatch.delenv("NATGRAD_DATA", raising=False)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", answer)


def publish_digits(counts, n_train, size, words=None):
    test = np.repeat(np.arange(10), counts)
    y = np.concatenate([np.arange(n_train) % 10, test])
    return np.full((len(y), size), 255.0), np.array([words[i] if words else str(i) for i in y], dtype=object)


def test_openml_stands_in_for_a_missing_folder(monkeypatch):
    asked = []
    monkeypatch.setattr(data, "MNIST_TEST_COUNTS", (2,) * 10)
    openml(monkeypatch, lambda name, **how: asked.append((name, how)) or publish_digits([2] * 10, 50, 784))
    split = data.mnist()
    assert asked[0][0] == "mnist_784"
    assert asked[0][1]["version"] == 1
    assert split.train_x.shape == (50, 28, 28)
    assert split.test_y.tolist() == sorted([*range(10)] * 2)
    assert split.train_x.max() == 1


def test_openml_class_names_become_numbers(monkeypatch):
    openml(monkeypatch, lambda name, **how: publish_digits([1000] * 10, 50, 3072, data.CIFAR_CLASSES))
    split = data.cifar10()
    assert split.test_x.shape == (10_000, 3, 32, 32)
    assert split.test_y[-1] == 9


def test_openml_in_another_order_is_refused(monkeypatch):
    openml(monkeypatch, lambda name, **how: publish_digits([999, 1001] + [1000] * 8, 50, 784))
    with pytest.raises(DataError, match="NATGRAD_DATA"):
        data.fashion_mnist()


def test_no_folder_and_no_network_is_one_sentence(monkeypatch):
    def offline(name, **how):
        raise OSError("no route")

    openml(monkeypatch, offline)
    with pytest.raises(DataError, match="set NATGRAD_DATA to a folder that holds fashion-mnist"):
        data.fashion_mnist()


ARCHIVES = (data.binarized_mnist, data.fer2013, data.omniglot, data.frey_faces, data.orl_faces)


@pytest.mark.parametrize("load", [*ARCHIVES, data.kodak])
def test_sets_without_a_download_say_how_to_get_them(load, monkeypatch):
    monkeypatch.delenv("NATGRAD_DATA", raising=False)
    with pytest.raises(DataError, match="set NATGRAD_DATA to a folder that holds"):
        load()


def test_damaged_archive_is_named(folder):
    (folder / "frey_faces.npz").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match=r"frey_faces\.npz is not a readable"):
        data.frey_faces()


def grey(*shape):
    return np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)


def test_archives_are_unpacked(folder):
    bits = {f"{part}_bits": np.packbits(grey(3, 784) > 127, axis=1) for part in ("train", "valid", "test")}
    np.savez(folder / "binarized_mnist.npz", **bits, **{f"y_{p}": np.arange(3) for p in ("train", "valid", "test")})
    names = np.array(["a", "b"])
    faces = {
        "x_train": grey(4, 6, 6),
        "y_train": np.array([0, 1, 0, 1]),
        "x_test": grey(2, 6, 6),
        "y_test": np.array([0, 1]),
    }
    np.savez(folder / "fer2013_subset.npz", **faces, x_unlabelled=grey(5, 6, 6), class_names=names)
    colour = {**faces, "x_train": grey(4, 6, 6, 3), "x_test": grey(2, 6, 6, 3)}
    np.savez(folder / "cifar10_subset.npz", **colour, class_names=names)
    np.savez(folder / "orl_faces.npz", x=grey(20, 3, 2), subject=np.repeat([0, 1], 10))
    assert set(data.binarized_mnist().valid_x.unique().tolist()) == {0.0, 1.0}
    assert data.fer2013().unlabelled_x.shape == (5, 6, 6)
    split = data.cifar10()
    torch.testing.assert_close(
        split.train_x[1, 2], torch.from_numpy(colour["x_train"][1, :, :, 2].astype(np.float32) / 255)
    )
    assert data.orl_faces().train_y.tolist() == [0] * 5 + [1] * 5


def test_uci_splits(folder):
    test = np.zeros((2, 7), dtype=bool)
    test[0, 5:] = test[1, :1] = True
    np.savez(folder / "uci_regression.npz", yacht_x=np.arange(14.0).reshape(7, 2), yacht_y=np.arange(7.0),
             yacht_test_bits=np.packbits(test, axis=1))  # fmt: skip
    assert data.uci("yacht", 0).test_y.tolist() == [5, 6]
    assert data.uci("yacht", 1).train_x.shape == (6, 2)
    with pytest.raises(DataError, match="expected 0 to 1"):
        data.uci("yacht", 2)
    with pytest.raises(DataError, match="expected one of yacht"):
        data.uci("boat")


@pytest.mark.skipif("NATGRAD_DATA" not in os.environ, reason="NATGRAD_DATA is not set")
@pytest.mark.parametrize("load", [data.mnist, data.fashion_mnist, data.cifar10, *ARCHIVES])
def test_real_sets_where_they_are(load):
    split = load()
    assert len(split.train_x) == len(split.train_y) > 0
    assert len(split.test_x) == len(split.test_y) > 0
    assert split.train_x.min() >= 0
    assert split.train_x.max() <= 1
    assert split.train_x.std() > 0.05


# Downloads are kept, and a file that is not what was kept is fetched again.


class Source:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.asked += 1
        return {"x": np.arange(6, dtype=np.uint8).reshape(2, 3), "y": np.array(["a", "b"])}


def test_a_set_is_downloaded_once(cache):
    source = Source()
    for _ in range(3):
        arrays = read_cached("letters", source)
        assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["y"].tolist() == ["a", "b"]
    assert source.asked == 1
    noted, name = (cache / "letters.npz.sha256").read_text().split()
    assert noted == hash_file(cache / "letters.npz")
    assert name == "letters.npz"


@pytest.mark.parametrize("damage", ["cut", "changed", "no note"])
def test_a_damaged_file_is_downloaded_again(cache, damage):
    source = Source()
    read_cached("letters", source)
    file = cache / "letters.npz"
    content = file.read_bytes()
    if damage == "no note":
        (cache / "letters.npz.sha256").unlink()
    else:
        file.write_bytes(content[:40] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    assert read_cached("letters", source)["y"].tolist() == ["a", "b"]
    assert source.asked == 2
    assert read_cached("letters", source)["y"].tolist() == ["a", "b"]
    assert source.asked == 2


def test_a_folder_that_cannot_be_written_is_no_trouble(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NATGRAD_CACHE", str(tmp_path / "file" / "below"))
    assert read_cached("letters", Source())["y"].tolist() == ["a", "b"]


def test_the_folder_is_the_platform_s(monkeypatch, tmp_path):
    monkeypatch.delenv("NATGRAD_CACHE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "natgrad"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "natgrad"


def test_a_user_without_a_home_has_a_folder_all_the_same(monkeypatch):
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("NATGRAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    assert cache_folder().is_relative_to(tempfile.gettempdir())
