"""Checkpoints that are refused before a launch; no pickle in a checkpoint ever runs code. Nothing is launched here."""

from __future__ import annotations

import hashlib
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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from labkit import SpecError
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.plan import checkpoints
from labkit.plan.script import settings, write_script
from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.runs.handle import settle
from labkit.training.strategies import STRATEGIES, base, sharded
from labkit.training.workloads import WORKLOADS

SAVING = [name for name, row in STRATEGIES.items() if "save_every" not in row.lacks]


def spec(strategy: str, workload: str | None = None, **more) -> Spec:
    workload = workload or ("gpt" if strategy == "cp" else "mlp")
    ranks = STRATEGIES[strategy].default_nproc or 2
    return Spec(strategy, workload, **{"nproc": min(ranks, 4), "device": "cpu", "steps": 100, "samples": 1280} | more)


def written(by: Spec, folder: Path, step: int = 30) -> Path:
    """A checkpoint as the script of a Spec writes it, with text instead of weights."""
    path = folder / f"step{step:08}"
    path.mkdir(parents=True)
    for name in ("state.pt", "more.pt"):
        (path / name).write_text(name)
    own = {"step": step, "world_size": by.processes}
    return described(path, **checkpoints.identity(by), **own)


def described(path: Path, **manifest) -> Path:
    """Writes the manifest of a checkpoint, with the current checksums of its files."""
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": sums}))
    return path


def refused(strategy: str, resume: object, **more) -> str:
    with pytest.raises(SpecError) as error:
        settle(spec(strategy, resume=str(resume), **more))
    assert error.value.field == "resume"
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- a different identity


@pytest.mark.parametrize("writer", SAVING)
def test_a_checkpoint_is_resumed_by_its_layout_and_refused_by_every_other(writer, tmp_path):
    path = written(spec(writer, "gpt"), tmp_path)
    for reader in SAVING:
        if STRATEGIES[reader].layout == STRATEGIES[writer].layout:
            assert settle(spec(reader, "gpt", resume=str(path))).resume == str(path)
        else:
            said = refused(reader, path, workload="gpt")
            assert f"{path} contains {checkpoints.LAYOUTS[STRATEGIES[writer].layout]}, and {reader} loads " in said
            assert writer in said.split("resume with one of the strategies ")[1]


def test_every_layout_has_a_description_and_every_script_the_identity_that_the_launcher_expects():
    assert {row.layout for row in STRATEGIES.values()} == set(checkpoints.LAYOUTS)
    for strategy in SAVING:
        one = spec(strategy, save_every=5)
        assert settings(one)["MANIFEST"] == checkpoints.identity(one)
        assert f'"layout": "{STRATEGIES[strategy].layout}"' in write_script(one)
    assert checkpoints.identity(Spec("single", "cnn")) == base.MANIFEST


@pytest.mark.parametrize("other", [name for name in WORKLOADS if name != "mlp"])
def test_another_workload_is_refused_with_the_one_to_use(other, tmp_path):
    path = written(Spec("ddp", other, nproc=2), tmp_path)
    assert f"{path} belongs to the workload '{other}', and this run trains mlp; use --workload {other}, or" in refused(
        "ddp", path
    )


def test_another_size_of_the_model_is_refused_with_the_option_to_use(tmp_path):
    path = written(spec("ddp", "gpt", options={"size": "10M"}), tmp_path)
    said = refused("ddp", path, workload="gpt")
    assert "has size='10M', and this run has size='1M'; use --option size=10M, or run without --resume" in said
    described(path, **checkpoints.identity(spec("ddp", "gpt")) | {"step": 30, "world_size": 2, "context": "\x1b]0;"})
    assert r"has context='\x1b]0;', and this run has context=128; run without" in refused("ddp", path, workload="gpt")


def test_other_ranks_resume_unless_their_stages_hold_other_blocks(tmp_path):
    for strategy in ("ddp", "fsdp2", "tp", "pp"):
        path = written(spec(strategy, nproc=2), tmp_path / strategy)
        assert settle(spec(strategy, nproc=3 if strategy == "pp" else 4, resume=str(path))).resume == str(path)
    interleaved = {"schedule": "Interleaved1F1B"}
    path = written(spec("pp", "gpt", nproc=2, options=interleaved), tmp_path / "two stages")
    assert settle(spec("pp", "gpt", nproc=2, options=interleaved, resume=str(path))).resume == str(path)
    assert "with different pipeline stages than the 2 ranks" in refused("pp", path, workload="gpt", nproc=2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"steps": 20}, "use --steps 31 or more"), ({"steps": None, "epochs": 1}, "use --epochs 7 or more")],
)
def test_a_run_with_nothing_left_to_train_is_refused(fields, says, tmp_path):
    # 1,280 samples, 256 per step: 5 steps per epoch
    path = written(spec("ddp"), tmp_path)
    said = refused("ddp", path, **fields)
    assert "was written at step 30, and the run ends at step " in said
    assert said.endswith(f"nothing is left to train; {says}")


# ---- locating checkpoints


def test_a_run_is_named_by_its_name_its_path_its_checkpoints_or_one_of_them(runs, tmp_path, monkeypatch):
    folder = RunFolder.create("ddp-x2", runs)
    RunFolder.write_json(folder.spec, spec("ddp").to_json())
    older, newer = (written(spec("ddp"), folder.checkpoints, step) for step in (20, 30))
    monkeypatch.chdir(runs)
    for place in (folder.name, "last", f"./{folder.name}", folder.path, folder.checkpoints, newer):
        assert settle(spec("ddp", resume=str(place))).resume == str(newer)
    monkeypatch.chdir(tmp_path)
    assert settle("ddp", workload="mlp", nproc=2, device="cpu", steps=100, resume=folder.name).resume == str(newer)
    assert settle(spec("ddp", resume=str(older))).resume == str(older)


def test_a_script_that_is_only_printed_names_the_checkpoint_too(runs, capsys):
    folder = RunFolder.create("ddp-x2", runs)
    RunFolder.write_json(folder.spec, spec("ddp").to_json())
    path = written(spec("ddp"), folder.checkpoints)
    asked = ("--workload", "mlp", "--nproc", "2", "--steps", "40", "--resume", folder.name)
    assert act(cli.parse(("script", "zero1", *asked))) == 0
    assert f'\nRESUME = "{path}"' in capsys.readouterr().out
    assert act(cli.parse(("script", "fsdp2", *asked))) == 2
    assert f"labkit: {path} contains the whole state in one file, and fsdp2 loads" in capsys.readouterr().err


def test_folders_without_checkpoints_are_refused(runs, tmp_path):
    assert "there is no run 'nothing'" in refused("ddp", "nothing")
    assert "there are no checkpoints in" in refused("ddp", tmp_path)
    (tmp_path / "step00000010.pt").write_bytes(b"")
    assert "have no manifest.json (an older version wrote them" in refused("ddp", tmp_path)
    shards = tmp_path / "shards" / "step00000010"
    shards.mkdir(parents=True)
    assert "have no manifest.json" in refused("ddp", shards)
    assert "have no manifest.json" in refused("ddp", shards.parent)


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
        ({"format": 1}, "has format 1, and this version reads format 2"),
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


def model_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["whole", "shards"])
def form(request, group, tmp_path, monkeypatch):
    """The module whose save and resume are used, and a checkpoint written by it."""
    module = {"whole": base, "shards": sharded}[request.param]
    for one in (base, sharded):
        monkeypatch.setattr(one, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(base, "MANIFEST", base.MANIFEST | {"layout": request.param})
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


def test_no_shard_can_run_code_regardless_of_the_index(group, tmp_path, monkeypatch):
    """torch's reader unpickles entries that the index declares as bytes; here the index may not contain them."""
    for one in (base, sharded):
        monkeypatch.setattr(one, "CHECKPOINTS", tmp_path / "checkpoints")
    sharded.save(*model_of(1), 7)
    path, mark = tmp_path / "checkpoints" / "step00000007", tmp_path / "code ran"
    torch.save(Evil(mark), path / "__0_0.distcp")
    manifest = json.loads((path / "manifest.json").read_text())
    with torch.serialization.safe_globals(sharded.INDEX):
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
    for one in (base, sharded):
        monkeypatch.setattr(one, "CHECKPOINTS", tmp_path / "checkpoints")
    sharded.save(*model_of(1), 7)
    path = tmp_path / "checkpoints" / "step00000007"
    shutil.copy(path / "__0_0.distcp", tmp_path / "outside")
    with torch.serialization.safe_globals(sharded.INDEX):
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
    monkeypatch.setattr(base, "MANIFEST", base.MANIFEST | {"workload": "mlp"})
    with pytest.raises(SystemExit, match="workload must be 'mlp', got 'cnn'"):
        module.resume(*model_of(2))
    monkeypatch.setattr(base, "RESUME", str(path / "nothing"))
    with pytest.raises(SystemExit, match=r"nothing cannot be used: .*No such file"):
        module.resume(*model_of(2))
    assert "cannot be used" in capsys.readouterr().out


def test_a_new_run_starts_at_step_0(monkeypatch, tmp_path):
    monkeypatch.setattr(base, "CHECKPOINTS", tmp_path / "checkpoints")
    assert base.resume(*model_of(1)) == 0
