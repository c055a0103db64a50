"""Damaged and malicious checkpoints: no pickle in a checkpoint ever runs code."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import described, model_of, refused, spec, written
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from labkit.plan import checkpoints
from labkit.training.strategies import checkpoints as whole
from labkit.training.strategies import sharded

# ---- damaged and malicious checkpoints


def test_every_bit_that_flips_is_found_and_the_newest_intact_checkpoint_is_named(tmp_path):
    older, newest = (written(spec("ddp"), tmp_path, step) for step in (20, 30))
    for name in ("state.pt", "more.pt"):
        whole = (newest / name).read_bytes()
        for bit in range(8 * len(whole)):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            (newest / name).write_bytes(flipped)
            assert f"{newest / name} has changed since it was written" in checkpoints.damage(checkpoints.read(newest))
        assert refused("ddp", tmp_path).endswith(
            f"(its SHA-256 differs); resume from the newest intact checkpoint with --resume {older}"
        )
        (newest / name).write_bytes(whole)
    (newest / "more.pt").unlink()
    said = refused("ddp", tmp_path)
    assert f"{newest / 'more.pt'} cannot be read (No such file or directory)" in said
    assert said.endswith(f"--resume {older}")
    (older / "state.pt").write_bytes(b"")
    assert "its folder contains no other intact checkpoint" in refused("ddp", tmp_path)


def test_links_and_special_files_are_refused(tmp_path):
    path = written(spec("ddp"), tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("state.pt")  # with the right content
    (path / "state.pt").unlink()
    (path / "state.pt").symlink_to(outside)
    assert f"{path / 'state.pt'} cannot be read (not a regular file)" in refused("ddp", path)
    (path / "state.pt").unlink()
    os.mkfifo(path / "state.pt")
    assert "not a regular file" in refused("ddp", path)
    (path / "state.pt").unlink()
    (path / "state.pt").symlink_to("/dev/zero")
    assert "not a regular file" in refused("ddp", path)
    (path / "manifest.json").rename(outside)
    (path / "manifest.json").symlink_to(outside)
    assert "is not a valid checkpoint manifest" in refused("ddp", path)


DIGEST = "0" * 64

GOOD = {"step": 30, "world_size": 2, "sha256": {"state.pt": DIGEST}}


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"step": 30',
        json.dumps({}),
        json.dumps(GOOD | {"step": "30"}),
        json.dumps(GOOD | {"step": True}),
        json.dumps(GOOD | {"step": -1}),
        json.dumps(GOOD | {"step": 1e400}),
        json.dumps(GOOD | {"world_size": None}),
        json.dumps(GOOD | {"sha256": {}}),
        json.dumps(GOOD | {"sha256": ["state.pt"]}),
        json.dumps(GOOD | {"sha256": {"../outside": DIGEST}}),
        json.dumps(GOOD | {"sha256": {"/dev/zero": DIGEST}}),
        json.dumps(GOOD | {"sha256": {"..": DIGEST}}),
        json.dumps(GOOD | {"sha256": {"": DIGEST}}),
        json.dumps(GOOD | {"sha256": {"a\0b": DIGEST}}),
        json.dumps(GOOD | {"sha256": {"state.pt": "short"}}),
        json.dumps(GOOD | {"sha256": {"state.pt": 5}}),
        '"' + "x" * (5 << 20) + '"',
        b"\xff\xfe",
    ],
    ids=lambda text: repr(text[:60]),
)
def test_an_invalid_manifest_is_refused(manifest, tmp_path):
    path = written(spec("ddp"), tmp_path)
    (path / "manifest.json").write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    assert "is not a valid checkpoint manifest" in refused("ddp", path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 1}, "has format 1, and this version reads format 3"),
        ({"format": True}, "has format True"),
        ({"layout": "other"}, "has the layout 'other', which no strategy can load"),
        ({"layout": ["whole"]}, "has the layout ['whole'], which no strategy can load"),
        ({"workload": {}}, "belongs to the workload {}, and this run trains mlp; run without --resume"),
    ],
)
def test_an_identity_of_any_type_is_compared(change, says, tmp_path):
    path = written(spec("ddp"), tmp_path)
    described(path, **checkpoints.identity(spec("ddp")) | {"step": 30, "world_size": 2} | change)
    assert says in refused("ddp", path)


# ---- the functions of the script


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.makedirs, (str(self.mark), 0o700, True)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["whole", "shards"])
def form(request, group, tmp_path, monkeypatch):
    """The module whose save and resume are used, and a checkpoint written by it."""
    module = {"whole": whole, "shards": sharded}[request.param]
    for one in (whole, sharded):
        monkeypatch.setattr(one, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(whole, "MANIFEST", whole.MANIFEST | {"layout": request.param})
    module.save(*model_of(1), 7)
    return module, tmp_path / "checkpoints" / "step00000007"


def test_saved_state_is_restored(form):
    module, path = form
    saved, (other, optimizer) = model_of(1)[0], model_of(2)
    assert not torch.equal(saved[0].weight, other[0].weight)
    assert module.resume(other, optimizer) == 7
    assert torch.equal(saved[0].weight, other[0].weight)
    assert checkpoints.read(path).step == 7
    assert checkpoints.damage(checkpoints.read(path)) is None
    assert not (path.parent / "unfinished").exists()


def test_no_file_of_a_checkpoint_can_run_code(form, tmp_path):
    """The attacker also writes the manifest, so the checksums match."""
    module, path = form
    mark, manifest = tmp_path / "code ran", json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    spared, saved = [], io.BytesIO()
    torch.save(Evil(mark), saved)
    for name in sorted(file.name for file in path.iterdir() if file.name != "manifest.json"):
        for evil in (saved.getvalue(), pickle.dumps(Evil(mark))):
            copy = tmp_path / "copy"
            shutil.copytree(path, copy)
            (copy / name).write_bytes(evil)
            described(copy, **manifest)
            shutil.rmtree(path)
            copy.rename(path)
            try:
                module.resume(*model_of(2))
                spared.append(name)
            except (pickle.UnpicklingError, dcp.CheckpointException, RuntimeError):
                pass
            assert not mark.exists(), f"{name} ran code"
            shutil.rmtree(path)
            module.save(*model_of(1), 7)
    assert set(spared) <= {".metadata"}, "torch's own index is never read"
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists(), "it would have run"


def test_the_other_layout_is_read_and_runs_no_code(form, tmp_path, monkeypatch):
    writer, path = form
    reader, layout, names = (
        (sharded, "shards", ["state.pt"]) if writer is whole else (whole, "whole", ["index.pt", "progress.pt"])
    )
    for one in (whole, sharded):
        monkeypatch.setattr(one, "RESUME", "another run")
    monkeypatch.setattr(whole, "MANIFEST", whole.MANIFEST | {"layout": layout})
    (saved, old), (other, new) = model_of(1), model_of(2)
    assert reader.resume(other, new) == 7
    for one, same in zip(saved.parameters(), other.parameters()):
        assert torch.equal(one, same) and torch.equal(old.state[one]["exp_avg"], new.state[same]["exp_avg"])
    mark, manifest = tmp_path / "code ran", json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    for name in names:
        good = (path / name).read_bytes()
        torch.save(Evil(mark), path / name)
        described(path, **manifest)
        with pytest.raises((pickle.UnpicklingError, dcp.CheckpointException)):
            reader.resume(*model_of(2))
        (path / name).write_bytes(good)
    assert not mark.exists()


def test_no_shard_can_run_code_regardless_of_the_index(group, tmp_path, monkeypatch):
    """torch's reader unpickles entries that the index declares as bytes; here the index may not contain them."""
    for one in (whole, sharded):
        monkeypatch.setattr(one, "CHECKPOINTS", tmp_path / "checkpoints")
    sharded.save(*model_of(1), 7)
    path, mark = tmp_path / "checkpoints" / "step00000007", tmp_path / "code ran"
    torch.save(Evil(mark), path / "__0_0.distcp")
    manifest = json.loads((path / "manifest.json").read_text())
    with torch.serialization.safe_globals(whole.INDEX):
        index = torch.load(path / "index.pt", weights_only=True)
    for where in index.storage_data.values():
        where.offset, where.length = 0, (path / "__0_0.distcp").stat().st_size
    as_tensors = dict(index.state_dict_metadata)
    as_bytes = {name: BytesStorageMetadata() for name in as_tensors}
    index.storage_data |= {MetadataIndex(name): next(iter(index.storage_data.values())) for name in as_bytes}
    for index.state_dict_metadata in (as_tensors, as_bytes):
        torch.save(index, path / "index.pt")
        (path / ".metadata").write_bytes(pickle.dumps(index))
        described(path, **{name: value for name, value in manifest.items() if name != "sha256"})
        with pytest.raises(dcp.CheckpointException):
            sharded.resume(*model_of(2))
        assert not mark.exists()
    model = model_of(2)[0]
    dcp.load({"model": dict.fromkeys(model.state_dict(), 0)}, checkpoint_id=path)
    assert mark.exists(), "torch's own reader runs it"


def test_an_index_cannot_refer_to_files_outside_its_folder(group, tmp_path, monkeypatch):
    for one in (whole, sharded):
        monkeypatch.setattr(one, "CHECKPOINTS", tmp_path / "checkpoints")
    sharded.save(*model_of(1), 7)
    path = tmp_path / "checkpoints" / "step00000007"
    shutil.copy(path / "__0_0.distcp", tmp_path / "outside")
    with torch.serialization.safe_globals(whole.INDEX):
        index = torch.load(path / "index.pt", weights_only=True)
    for where in index.storage_data.values():
        where.relative_path = "../../outside"
    torch.save(index, path / "index.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    described(path, **{name: value for name, value in manifest.items() if name != "sha256"})
    with pytest.raises(dcp.CheckpointException, match="outside"):
        sharded.resume(*model_of(2))


def test_a_damaged_or_different_checkpoint_ends_the_script(form, monkeypatch, capsys):
    module, path = form
    weights = next(file for file in sorted(path.iterdir()) if file.name in ("state.pt", "__0_0.distcp"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        SystemExit, match=f"Cannot resume: .*{weights.name} is missing or has changed since it was written"
    ):
        module.resume(*model_of(2))
    weights.write_bytes(data)
    monkeypatch.setattr(whole, "MANIFEST", whole.MANIFEST | {"workload": "mlp"})
    with pytest.raises(SystemExit, match="workload must be 'mlp', got 'cnn'"):
        module.resume(*model_of(2))
    monkeypatch.setattr(whole, "RESUME", str(path / "nothing"))
    with pytest.raises(SystemExit, match=r"nothing cannot be used: .*No such file"):
        module.resume(*model_of(2))
    assert "cannot be used" in capsys.readouterr().out


def test_a_new_run_starts_at_step_0(monkeypatch, tmp_path):
    monkeypatch.setattr(whole, "CHECKPOINTS", tmp_path / "checkpoints")
    assert whole.resume(*model_of(1)) == 0


def test_the_files_of_a_checkpoint_are_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(whole, "CHECKPOINTS", tmp_path)
    unfinished, flushed = tmp_path / "unfinished", set()
    unfinished.mkdir()
    (unfinished / "state.pt").write_bytes(b"weights")

    def fsync(descriptor: int) -> None:
        assert unfinished.exists()
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    whole.publish(unfinished, 3)
    files = {path.name: path.stat().st_ino for path in (tmp_path / "step00000003").iterdir()}
    assert set(files) == {"state.pt", "manifest.json"} and flushed == set(files.values())
