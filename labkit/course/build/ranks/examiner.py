"""The program of the examiner: draws the inputs of an exam, computes what a single device makes of them, and compares.

It runs in a process of its own. The seed is drawn here and leaves it nowhere; the ranks get tensors, each its own. As a
program it reads lines of JSON from standard input and answers each with one: `{"draw": …}`, then `{"judge": true}`.
"""

from __future__ import annotations

import importlib
import io
import json
import secrets
import sys
from pathlib import Path
from typing import Any

import torch

from labkit.course.build.ranks.entry import given_path, record_path, results_path, signature
from labkit.course.build.record import Record, Results, hint


class Exam:
    """One exam: a trial on some ranks, whose files are in `folder`; `settings` are those of an exercise whose task is
    drawn for each learner."""

    def __init__(self, module: str, trial: str, ranks: int, folder: str, settings: dict[str, Any]):
        self._module = importlib.import_module(f"labkit.course.build.trials.{module}")
        self._trial, self._ranks, self._folder = trial, ranks, Path(folder)
        self._keys = [secrets.token_hex(32) for _ in range(ranks)]
        torch.manual_seed(secrets.randbits(62))
        self._given = self._module.draw(trial, ranks, **settings)
        for rank, given in enumerate(self._given):
            path = given_path(self._folder, rank)
            own = {name: value.detach().clone() if hasattr(value, "detach") else value for name, value in given.items()}
            torch.save({"key": self._keys[rank], "given": own}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)

    def judged(self) -> list[dict[str, Any] | None]:
        """The record of each rank as a dict, with what was expected of it; None for a rank that wrote none."""
        read = [self._read(rank) for rank in range(self._ranks)]
        expected = self._module.expect(self._trial, self._given)
        for (record, results), mine in zip(read, expected):
            if record is not None:
                record.expected, record.figures["squares"] = mine.losses, mine.squares
                record.differences = mine.differences(results)
        if all(record is not None for record, _ in read):
            words = hint(expected, [results for _, results in read])
            for record, _ in read:
                if record is not None:
                    record.hint = words
        return [None if record is None else record.to_json() for record, _ in read]

    def _read(self, rank: int) -> tuple[Record | None, Results]:
        try:
            signed = json.loads(record_path(self._folder, rank).read_text(encoding="utf-8"))
            content = results_path(self._folder, rank).read_bytes()
        except FileNotFoundError:
            return None, {}
        except ValueError:
            return self._forged(rank, "record"), {}
        text = str(signed.get("record")) if isinstance(signed, dict) else ""
        if not text or signature(self._keys[rank], text.encode()) != signed.get("signature"):
            return self._forged(rank, "record"), {}
        record = Record.of(json.loads(text))
        if signature(self._keys[rank], content) != record.figures.pop("results"):
            return self._forged(rank, "results"), {}
        return record, torch.load(io.BytesIO(content), weights_only=True)

    def _forged(self, rank: int, what: str) -> Record:
        return Record(rank, forbidden=f"changes the {what} of its run, whose signature is not that of the judge")


def serve() -> None:
    """Answers the lines of standard input until it ends."""
    torch.set_num_threads(1)  # the ranks need the cores
    exam: Exam | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "draw" in request:
            exam, reply = Exam(**request["draw"]), "drawn"
        else:
            reply = json.dumps(exam.judged() if exam else [])
        print(reply, flush=True)


if __name__ == "__main__":
    serve()
