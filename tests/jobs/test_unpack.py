"""Zips from an untrusted source: nothing escapes, grows or appears unless the whole zip is accepted."""

from __future__ import annotations

import stat
import struct
import zipfile
from pathlib import Path

import pytest
from commands import called

from labkit.record import packed


def zipped(path: Path, *entries: tuple[str, bytes], mode: int = stat.S_IFREG | 0o644) -> Path:
    """A zip of these entries, whatever their names are."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries:
            entry = zipfile.ZipInfo("x")
            entry.filename = entry.orig_filename = name
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, mode << 16
            packed.writestr(entry, content)
    return path


def refused(path: Path) -> str:
    """The reason why a zip is refused; nothing of it may be left."""
    before = sorted(path.parent.parent.rglob("*"))
    with pytest.raises(packed.BadArchive) as caught:
        packed.unpack(path, path.parent / "out")
    assert sorted(path.parent.parent.rglob("*")) == before
    return str(caught.value)


@pytest.fixture
def place(tmp_path) -> Path:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    return inner


@pytest.mark.parametrize(
    "name",
    [
        "../escaped",
        "/tmp/escaped",
        "a/../../escaped",
        "..",
        "C:/escaped",
        "a\\..\\..\\escaped",
        "a//b",
        "./a",
        "a/\x1b[2J",
    ],
)
@pytest.mark.parametrize("kept", [(), (("train.py", b"first"),)])
def test_no_path_escapes(place, name, kept):
    assert "is refused" in refused(zipped(place / "job.zip", *kept, (name, b"x")))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_links_and_special_files_are_refused(place, kind):
    path = zipped(place / "job.zip", ("train.py", b"/etc/passwd"), mode=kind | 0o777)
    assert "'train.py' is a link or a special file" in refused(path)


def test_a_name_that_occurs_twice_is_refused(place):
    assert "occurs twice" in refused(zipped(place / "job.zip", ("train.py", b"1"), ("Train.py", b"2")))


def test_no_size_explodes(place, monkeypatch):
    monkeypatch.setattr(packed, "_MOST_BYTES", 1 << 20)
    assert "exceed 1.0 MiB" in refused(zipped(place / "job.zip", ("a", bytes(1 << 19)), ("b", bytes((1 << 19) + 1))))


def test_a_size_that_lies_does_not_help(place, monkeypatch):
    """The zip says that its file has 10 bytes, and has two million."""
    path = zipped(place / "job.zip", ("a", bytes(2_000_000)))
    data = path.read_bytes().replace(struct.pack("<L", 2_000_000), struct.pack("<L", 10))
    path.write_bytes(data)
    assert "cannot be unpacked" in refused(path)


def test_too_many_or_too_large(place, monkeypatch):
    monkeypatch.setattr(packed, "_MOST_FILES", 3)
    assert "more than the maximum of 3" in refused(zipped(place / "job.zip", *((str(n), b"") for n in range(4))))
    monkeypatch.setattr(packed, "_MOST_BYTES", 10)
    assert "is larger than" in refused(place / "job.zip")


@pytest.mark.parametrize("cut", [0, 10, -10])
def test_a_damaged_zip_is_named(place, cut):
    path = zipped(place / "job.zip", ("train.py", bytes(range(256)) * 20))
    path.write_bytes(path.read_bytes()[:cut])
    assert "damaged" in refused(path)


def test_a_changed_byte_is_found(place):
    path = zipped(place / "job.zip", ("train.py", bytes(range(256)) * 20))
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    assert "cannot be unpacked" in refused(path)


def test_commands_say_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    zipped(tmp_path / "job.zip", ("folder/", b""), ("folder/train.py", b"print()"))
    assert called("unpack", "job.zip") == 0
    assert (tmp_path / "job/folder/train.py").read_bytes() == b"print()"
    assert called("unpack", "job.zip") == 1
    assert "job exists; name a new folder with -o" in capsys.readouterr().err
    assert called("unpack", "none.zip") == 1
    assert "none.zip cannot be used: No such file" in capsys.readouterr().err
