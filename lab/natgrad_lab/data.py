"""Data sets as tensors: the embedded digits, drawn curves, and others from a local folder or from OpenML.

The folder is named by the environment variable NATGRAD_DATA and laid out like this (arrays are uint8):

    mnist/, fashion-mnist/    train-images-idx3-ubyte.gz and so on, the four idx files as published
    binarized_mnist.npz       train_bits, valid_bits, test_bits (n, 98), y_train, y_valid, y_test
    cifar10_subset.npz        x_train (n, 32, 32, 3), y_train, x_test, y_test, class_names
    fer2013_subset.npz        x_train (n, 48, 48), y_train, x_test, y_test, x_unlabelled, class_names
    omniglot28.npz            x_, character_ of `background` and `evaluation` (n, 28, 28)
    frey_faces.npz, orl_faces.npz, kodak_gray.npz, uci_regression.npz

Images come as float32 in [0, 1], labels as int64. Nothing here is packaged or published again: the sets keep
their owners' licences. Nothing is downloaded unless a set is asked for by name; what comes from OpenML is kept in the
folder that NATGRAD_CACHE names, by default the platform's folder for caches, with a checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VARIABLE = "NATGRAD_DATA"
CACHE_VARIABLE = "NATGRAD_CACHE"


class DataError(RuntimeError):
    """A data set is missing or damaged; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Split:
    """Inputs (n, ...) and targets (n, ...), cut into a part for training, one for testing, and perhaps more.

    Args:
        train_x: Inputs to train on; images in [0, 1].
        train_y: Their targets: class numbers (int64), or values.
        test_x: Inputs to test on.
        test_y: Their targets.
        valid_x: Inputs of a validation part, if there is one.
        valid_y: Its targets.
        unlabelled_x: Inputs without targets.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    valid_x: Tensor | None = None
    valid_y: Tensor | None = None
    unlabelled_x: Tensor | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Those with targets."""
        return ("train", "test") if self.valid_x is None else ("train", "valid", "test")

    def flat(self) -> Split:
        """The same set with every input as one row: (n, h, w) -> (n, h w)."""
        return replace(self, **{k: x.flatten(1) for k, x in vars(self).items() if k.endswith("_x") and x is not None})

    def to(self, device: torch.device | str) -> Split:
        """The same set on another device.

        Args:
            device: Where its tensors go.
        """
        return replace(self, **{name: x.to(device) for name, x in vars(self).items() if x is not None})


def digits() -> Split:
    """8 x 8 digits that come with scikit-learn: 1437 for training, the last 360 for testing (other writers)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn, which is missing: pip install scikit-learn") from error

    pixels, labels = load_digits(return_X_y=True)
    x, y = _unit(np.asarray(pixels), 16.0).reshape(-1, 8, 8), _labels(np.asarray(labels))
    return Split(x[:1437], y[:1437], x[1437:], y[1437:])


def curves(train: int = 20_000, test: int = 10_000, seed: int = 0) -> Split:
    """Smooth strokes 28 x 28, drawn here in the manner of the CURVES set of Hinton & Salakhutdinov 2006: not that set.

    Each is the parabola through three points, uniform in the middle of the image: six numbers tell all about it. The
    ink is 1 in the middle of the stroke and falls off as a Gaussian. There are no classes: labels are positions. The
    same seed gives the same images.

    Args:
        train: Images to train on.
        test: Images to test on.
        seed: Of the points.

    Raises:
        ValueError: Unless there is at least one image of each part.
    """
    if train < 1 or test < 1:
        raise ValueError(f"train is {train} and test {test}, expected at least one image of each")
    points = torch.rand(train + test, 3, 2, generator=torch.Generator().manual_seed(seed))
    x = torch.cat([strokes(5 + 18 * part) for part in points.split(250)])
    order = torch.arange(len(x))
    return Split(x[:train], order[:train], x[train:], order[train:])


def strokes(points: Tensor, size: int = 28, width: float = 0.9, samples: int = 50) -> Tensor:
    """Images of parabolas: the integral of a Gaussian along each, 1 on a straight line and at most, in 256 levels."""
    t = (torch.arange(samples) + 0.5) / samples
    first, second, third = points.unbind(1)
    middle = 2 * second - (first + third) / 2  # the control point of a parabola that passes through `second` at t = 1/2
    basis = torch.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2], 1)  # (samples, 3)
    slopes = torch.stack([2 * t - 2, 2 - 4 * t, 2 * t], 1)
    controls = torch.stack([first, middle, third], 1)  # (b, 3, 2)
    speed = (slopes @ controls).norm(dim=2, keepdim=True) / samples  # length of the curve per sample
    place = (basis @ controls).unsqueeze(3)  # (b, samples, 2, 1)
    distance = (place - torch.arange(size)) / width  # (b, samples, 2, size)
    ink = (-0.5 * distance * distance).clamp(min=-30).exp()  # further off it is nothing, but slow: denormal numbers
    total = (speed * ink[:, :, 0]).mT @ ink[:, :, 1] / (2 * torch.pi) ** 0.5 / width
    return (255 * total.clamp(max=1)).round() / 255


def mnist() -> Split:
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28. LeCun, Bottou, Bengio, Haffner 1998."""
    return _idx_or_openml("mnist", "mnist_784", MNIST_TEST_COUNTS)


def fashion_mnist() -> Split:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes, 28 x 28. Xiao, Rasul, Vollgraf 2017."""
    return _idx_or_openml("fashion-mnist", "Fashion-MNIST", (1000,) * 10)


def binarized_mnist() -> Split:
    """MNIST in a fixed binarisation, 50,000 / 10,000 / 10,000. Salakhutdinov & Murray 2008."""
    with _archive("binarized_mnist.npz", "binarised MNIST") as table:
        bits = [np.unpackbits(table[f"{part}_bits"], axis=1)[:, :784] for part in ("train", "test", "valid")]
        labels = [_labels(table[f"y_{part}"]) for part in ("train", "test", "valid")]
    images = [_unit(part.reshape(-1, 28, 28), 1.0) for part in bits]
    return Split(*(part for pair in zip(images, labels, strict=True) for part in pair))


def cifar10() -> Split:
    """CIFAR-10 in colour, (n, 3, 32, 32). Krizhevsky 2009.

    From the folder: a balanced subset of 10,000 + 2,000 whose pixels went through JPEG once, so that accuracies do
    not compare with published ones. From OpenML: all 50,000 + 10,000.
    """
    if _find("cifar10_subset.npz") is None:
        x, y = _openml("CIFAR_10", "cifar10_subset.npz")
        return _published_order("cifar10", x.reshape(-1, 3, 32, 32), y, (1000,) * 10, CIFAR_CLASSES)
    with _archive("cifar10_subset.npz", "CIFAR-10") as table:
        x = {part: _unit(table[f"x_{part}"], 255.0).permute(0, 3, 1, 2).contiguous() for part in ("train", "test")}
        return Split(x["train"], _labels(table["y_train"]), x["test"], _labels(table["y_test"]))


def fer2013() -> Split:
    """Faces 48 x 48 with seven emotions, and more without labels. Goodfellow et al. 2013."""
    with _archive("fer2013_subset.npz", "FER2013") as table:
        x_train, x_test, x_more = (_unit(table[f"x_{part}"], 255.0) for part in ("train", "test", "unlabelled"))
        return Split(x_train, _labels(table["y_train"]), x_test, _labels(table["y_test"]), unlabelled_x=x_more)


def omniglot() -> Split:
    """Handwritten characters 28 x 28: 964 of the background alphabets, 659 others to test on. Lake et al. 2015.

    Labels number the characters within each part: the two parts have no character in common.
    """
    with _archive("omniglot28.npz", "Omniglot") as table:
        x = [_unit(table[f"x_{part}"], 255.0) for part in ("background", "evaluation")]
        y = [_labels(table[f"character_{part}"]) for part in ("background", "evaluation")]
    return Split(x[0], y[0], x[1], y[1])


def frey_faces() -> Split:
    """1,965 video frames (28, 20) of one face: the first 1,565 to train, the last 400 to test. Labels are positions."""
    with _archive("frey_faces.npz", "the Frey faces") as table:
        x = _unit(table["x"], 255.0)
    order = torch.arange(len(x))
    return Split(x[:1565], order[:1565], x[1565:], order[1565:])


def orl_faces() -> Split:
    """400 faces (112, 92) of 40 persons: the first five of each to train, five to test. Samaria, Harter 1994."""
    with _archive("orl_faces.npz", "the ORL faces") as table:
        x, person = _unit(table["x"], 255.0), _labels(table["subject"])
    same = person[:, None] == person  # (n, n)
    early = same.tril(-1).sum(1) < 5
    return Split(x[early], person[early], x[~early], person[~early])


def kodak() -> tuple[Tensor, ...]:
    """24 natural photographs in grey, each (512, 768) or (768, 512), in [0, 1]."""
    with _archive("kodak_gray.npz", "the Kodak photographs") as table:
        return tuple(_unit(table[name], 255.0) for name in sorted(table.files))


def sample_photographs() -> tuple[Tensor, ...]:
    """Two photographs in grey, each (427, 640), in [0, 1], that come with scikit-learn: a temple and a flower."""
    from sklearn.datasets import load_sample_images

    weights = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # Rec. 601, as for the Kodak photographs
    return tuple(_unit(np.asarray(image) @ weights, 255.0) for image in load_sample_images().images)


def uci(name: str, split: int = 0) -> Split:
    """A UCI regression table in one of its usual train/test splits, in float64 and as given (not standardised).

    Args:
        name: boston, concrete, energy, kin8nm, naval, power, protein, wine_red or yacht.
        split: 0 to 19 (protein: 0 to 4).

    Raises:
        DataError: For another name or split.
    """
    with _archive("uci_regression.npz", "the UCI tables") as table:
        known = sorted(key.removesuffix("_x") for key in table.files if key.endswith("_x"))
        if name not in known:
            raise DataError(f"name is {name!r}, expected one of {', '.join(known)}")
        x, y = (torch.from_numpy(table[f"{name}_{part}"].astype(np.float64)) for part in "xy")
        tests = np.unpackbits(table[f"{name}_test_bits"], axis=1)[:, : len(y)].astype(bool)
    if not 0 <= split < len(tests):
        raise DataError(f"split is {split}, expected 0 to {len(tests) - 1}: {name} has {len(tests)} splits")
    test = torch.from_numpy(tests[split])
    return Split(x[~test], y[~test], x[test], y[test])


MNIST_TEST_COUNTS = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes from an idx file (.gz): two zero bytes, type 8, the number of axes, sizes, then the data."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name} is not a whole gzip file ({error}): fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(
            f"{path.name} starts with {raw[:4].hex() or 'nothing'}, expected 000008 (idx, bytes): replace it"
        )
    axes = raw[3]
    if len(raw) < 4 + 4 * axes:
        raise DataError(f"{path.name} ends inside its header: fetch it again")
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    body = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * axes)
    if body.size != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path.name} announces shape {shape} and holds {body.size} values: fetch it again")
    return body.reshape(shape)


def _idx_or_openml(folder: str, openml: str, test_counts: Sequence[int]) -> Split:
    place = _find(folder)
    if place is None:
        x, y = _openml(openml, f"{folder}/*.gz")
        return _published_order(folder, x.reshape(-1, 28, 28), y, test_counts)
    return Split(*_idx_part(place, "train"), *_idx_part(place, "t10k"))


def _idx_part(place: Path, part: str) -> tuple[Tensor, Tensor]:
    paths = place / f"{part}-images-idx3-ubyte.gz", place / f"{part}-labels-idx1-ubyte.gz"
    for path in paths:
        if not path.is_file():
            raise DataError(f"{place.name} lacks {path.name}: put the four published idx files there")
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{paths[0].name} has shape {images.shape} and {paths[1].name} {labels.shape}, expected (n, rows, columns) "
            "and (n,) with one n: the files do not belong together, fetch them again"
        )
    return _unit(images, 255.0), _labels(labels)


def _published_order(
    name: str, x: np.ndarray, y: np.ndarray, test_counts: Sequence[int], classes: tuple[str, ...] = ()
) -> Split:
    """OpenML keeps one table, the test part at its end; the counts of its classes tell whether that is so."""
    named = {word: number for number, word in enumerate(classes)}
    numbers = torch.tensor([named[v] if v in named else int(float(v)) for v in map(str, y)], dtype=torch.int64)
    cut = len(numbers) - sum(test_counts)
    counts = tuple(torch.bincount(numbers[cut:], minlength=len(test_counts)).tolist())
    if counts != tuple(test_counts):
        raise DataError(f"{name} from OpenML has test classes {counts}, expected {tuple(test_counts)}: set {VARIABLE}")
    pixels = _unit(x, 255.0)
    return Split(pixels[:cut], numbers[:cut], pixels[cut:], numbers[cut:])


def _openml(name: str, local: str) -> tuple[np.ndarray, np.ndarray]:
    def download() -> dict[str, np.ndarray]:
        try:
            from sklearn.datasets import fetch_openml
        except ModuleNotFoundError as error:
            raise DataError(f"{name} needs scikit-learn: pip install scikit-learn, or set {VARIABLE}") from error
        try:
            # what is kept is one file, with its checksum; a failure is told once, below
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
                x, y = fetch_openml(
                    name, version=1, as_frame=False, parser="liac-arff", return_X_y=True, data_home=folder
                )
        except Exception as error:  # the network fails in more ways than scikit-learn lists
            raise DataError(
                f"{name} could not be had from OpenML ({type(error).__name__}): set {VARIABLE} to a folder that holds "
                f"{local}, or try again with a network"
            ) from error
        return {"x": np.asarray(x, dtype=np.uint8), "y": np.asarray(y).astype(str)}

    table = read_cached(f"openml_{name}", download)
    return table["x"], table["y"]


def _find(entry: str) -> Path | None:
    root = os.environ.get(VARIABLE)
    path = Path(root) / entry if root else None
    return path if path is not None and path.exists() else None


def _archive(file: str, title: str) -> np.lib.npyio.NpzFile:
    path = _find(file)
    if path is None:
        raise DataError(f"{title} is not here: set {VARIABLE} to a folder that holds {file} (see natgrad_lab.data)")
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is not a readable npz archive ({error}): fetch it again") from error


def _unit(pixels: np.ndarray, top: float) -> Tensor:
    return torch.from_numpy(np.asarray(pixels, dtype=np.float32) / np.float32(top))


def _labels(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


# Downloads, in a folder of one's own, each with the SHA-256 of its file


def cache_folder() -> Path:
    """The folder: what NATGRAD_CACHE names, else `natgrad` in the platform's folder for caches."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # a user without a name, as in some containers
        home = Path(tempfile.gettempdir())
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "natgrad"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "natgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "natgrad"


def read_cached(name: str, download: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of a data set: from the cache if its file is whole, else downloaded, and kept where that can be.

    A file whose checksum is not the one noted beside it is downloaded again.
    """
    file = cache_folder() / f"{name}.npz"
    note = file.with_suffix(".npz.sha256")
    if file.is_file() and note.is_file() and note.read_text().split()[:1] == [hash_file(file)]:
        with np.load(file, allow_pickle=False) as table:
            return {key: table[key] for key in table.files}
    arrays = dict(download())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{name}.{os.getpid()}.npz")
        np.savez_compressed(part, **arrays)  # type: ignore[arg-type]
        part.replace(file)
        note.write_text(f"{hash_file(file)}  {file.name}\n")
    except OSError:  # a folder that cannot be written costs another download, no more
        pass
    return arrays


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
