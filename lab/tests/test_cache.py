"""Downloads are kept, and a file that is not what was kept is fetched again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from natgrad_lab.cache import cache_folder, hash_file, read_cached


class Source:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.asked += 1
        return {"x": np.arange(6, dtype=np.uint8).reshape(2, 3), "y": np.array(["a", "b"])}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NATGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_set_is_downloaded_once(folder):
    source = Source()
    for _ in range(3):
        arrays = read_cached("letters", source)
        assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["y"].tolist() == ["a", "b"]
    assert source.asked == 1
    noted, name = (folder / "letters.npz.sha256").read_text().split()
    assert noted == hash_file(folder / "letters.npz")
    assert name == "letters.npz"


@pytest.mark.parametrize("damage", ["cut", "changed", "no note"])
def test_a_damaged_file_is_downloaded_again(folder, damage):
    source = Source()
    read_cached("letters", source)
    file = folder / "letters.npz"
    content = file.read_bytes()
    if damage == "no note":
        (folder / "letters.npz.sha256").unlink()
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
