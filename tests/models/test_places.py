from __future__ import annotations

from pathlib import Path

from longwire.models.places import model_files


def names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder.resolve())) for path in model_files([folder])]


def test_files_below_a_folder(tmp_path: Path) -> None:
    for name in ("b.gguf", "a-00001-of-00002.gguf", "deep/er/c.gguf", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "folder.gguf").mkdir()
    assert names(tmp_path) == ["a-00001-of-00002.gguf", "b.gguf", "deep/er/c.gguf"]


def test_links_stay_inside(tmp_path: Path) -> None:
    inside, outside = tmp_path / "models", tmp_path / "secrets"
    (inside / "blobs").mkdir(parents=True)
    outside.mkdir()
    for path in (inside / "blobs" / "0123", outside / "s.gguf"):
        path.touch()
    (inside / "model.gguf").symlink_to("blobs/0123")
    (inside / "out.gguf").symlink_to(outside / "s.gguf")
    (inside / "out").symlink_to(outside)
    (inside / "nowhere.gguf").symlink_to("missing")
    (inside / "circle.gguf").symlink_to("circle.gguf")
    assert names(inside) == ["model.gguf"]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert model_files([tmp_path / "gone"]) == []
