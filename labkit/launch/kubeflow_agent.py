"""Kubeflow's SDK as far as a run needs it, and the program that follows a TrainJob.

`python -m labkit.launch.kubeflow_agent RUN_DIR JOB`: follows a job of Kubeflow Trainer until it has ended. JOB is a
`TrainJob` in JSON.

The supervisor starts it instead of torchrun. It writes each state of the job as an event, and what its pods print to
the run folder: all of it to `logs/pods.log`, in the form of `kubectl logs --prefix`, and the lines of each rank to a
log of its own. It exits with 0 if the job is complete, and deletes the job on SIGTERM. The SDK is imported by the calls
that use it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from labkit.analysis.foreign.log_lines import read_log
from labkit.analysis.foreign.logs import explain
from labkit.common.files import is_same_file
from labkit.common.text import visible_line
from labkit.record.documents import TrainJob
from labkit.record.folder import RunFolder
from labkit.record.writer import Writer

# ---- the SDK


FOLDER = "labkit/run-folder"  # the annotation of a TrainJob with the run folder that it belongs to
_KIND = "trainer.kubeflow.org", "v1alpha1"  # group and version of TrainJobs
_IN_POD = Path("/var/run/secrets/kubernetes.io")
_ANSWER = 30.0  # seconds in which a cluster answers
_MOST = 400  # characters of an error


class ClusterError(Exception):
    """The SDK or the cluster refused; the message is one clause."""


def current_context() -> tuple[str, str]:
    """The name and the namespace of the kubeconfig's current context; empty in a pod of the cluster, which has none.
    Raises `ClusterError` for a kubeconfig that cannot be read."""
    from kubernetes.config import list_kube_config_contexts

    if _IN_POD.is_dir() and not _kubeconfig():
        return "", ""
    try:
        _, context = list_kube_config_contexts(_kubeconfig())
    except Exception as error:  # whatever a file makes its parsers raise
        raise ClusterError(words(error)) from None
    return context["name"], context["context"].get("namespace") or "default"


def _kubeconfig() -> str | None:
    """The files of KUBECONFIG, which the SDK would read once only, when it is imported; None for the default."""
    return os.environ.get("KUBECONFIG") or None


def client(namespace: str = "", context: str = "") -> Any:
    """A TrainerClient for a namespace in the cluster of a context; both are empty in a pod of the cluster. Raises
    `ClusterError`."""
    from kubeflow.trainer import KubernetesBackendConfig, TrainerClient

    # they warn of what cannot be read, such as the version of the control plane, and of each attempt to connect
    for name in ("kubeflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        known = {"namespace": namespace, "context": context, "config_file": _kubeconfig() if context else None}
        return TrainerClient(KubernetesBackendConfig(**{name: value or None for name, value in known.items()}))
    except Exception as error:  # ConfigException, and whatever a kubeconfig makes its parsers raise
        raise ClusterError(words(error)) from None


def words(error: BaseException) -> str:
    """An error of the SDK as one clause: its cause, and of an answer of the API server its message."""
    while isinstance(cause := error.__cause__ or getattr(error, "reason", None), BaseException):
        error = cause  # urllib3 has it in `reason`
    said = str(error)
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        said = json.loads(error.body)["message"]  # type: ignore[attr-defined]  # the answer of the API server
    return visible_line(" ".join(said.split()) or type(error).__name__)[:_MOST]


@dataclass(frozen=True)
class Seen:
    """A TrainJob as its cluster shows it: `state` is Created, Running, Complete, Failed or Gone, with the `reason`;
    `pods` are the names of those that have begun, by node, and `folder` is the run folder that it belongs to."""

    state: str
    reason: str = ""
    pods: Mapping[int, str] = field(default_factory=dict)
    folder: str = ""


ENDED = ("Complete", "Failed", "Gone")


def seen(trainer: Any, job: TrainJob) -> Seen:
    """A TrainJob now. Raises `ClusterError` if the cluster does not answer."""
    asked = *_KIND, job.namespace, "trainjobs", job.name
    try:
        raw = trainer.backend.custom_api.get_namespaced_custom_object(*asked, _request_timeout=_ANSWER)
    except Exception as error:
        if getattr(error, "status", None) == 404:
            return Seen("Gone", "it was deleted")
        raise ClusterError(words(error)) from None
    try:
        known = trainer.get_job(job.name)
    except Exception as error:
        raise ClusterError(words(error)) from None
    begun = {step.name: step.pod_name for step in known.steps if step.status not in (None, "Pending")}
    pods = {int(name.removeprefix("node-")): pod for name, pod in begun.items() if re.fullmatch(r"node-\d+", name)}
    running = [step for step in known.steps if step.status in ("Running", "Succeeded")]
    status = raw.get("status") or {}
    if known.status in ENDED:
        conditions = [
            condition for condition in status.get("conditions") or [] if condition.get("type") == known.status
        ]
        reason = (conditions[-1].get("message") or conditions[-1].get("reason") or "") if conditions else ""
    else:
        reason = _progress(status.get("trainerStatus") or {}) or f"{len(running)} of {job.nodes} pods run"
    folder = (raw["metadata"].get("annotations") or {}).get(FOLDER, "")
    return Seen(known.status, visible_line(reason)[:_MOST], pods, folder)


def _progress(status: dict[str, Any]) -> str:
    """What a script in the pods has reported of its progress."""
    share, left = status.get("progressPercentage"), status.get("estimatedRemainingSeconds")
    parts = [f"{share} % done"] if share is not None else []
    parts += [f"{left} s left"] if left is not None else []
    parts += [f"{metric['name']} {metric['value']}" for metric in status.get("metrics") or []][:4]
    return ", ".join(parts)


def is_own(found: Seen, folder: RunFolder) -> bool:
    """Whether a TrainJob was submitted with this run folder: the content of a run folder proves nothing."""
    return bool(found.folder) and is_same_file(folder.path, found.folder)


_PAUSES = (0.0, 0.5, 2.0)  # seconds before each attempt to delete a job


def cancel(job: TrainJob, folder: RunFolder | None = None) -> None:
    """Deletes a TrainJob and thereby its pods, which is how Kubeflow stops a job; leaves one that has ended, because
    the output of its pods can still be read. Asks again if the cluster did not answer. With `folder`, only if the job
    is that of this run folder."""
    for pause in _PAUSES:
        time.sleep(pause)
        with suppress(ClusterError, ImportError):
            trainer = client(job.namespace, job.context)
            found = seen(trainer, job)
            if found.state in ENDED or (folder is not None and not is_own(found, folder)):
                return
            with suppress(Exception):  # the next attempt sees whether it is gone
                trainer.delete_job(job.name)


# ---- what the pods print


_OF_RANK = re.compile(r"\[[A-Za-z_]+(\d{1,5})\]:")  # torchrun --tee


class _Pods:
    """Writes what the pods print, each followed by a thread. After a new start of this program, or of a connection, the
    lines that are already there are skipped."""

    def __init__(self, trainer: Any, job: TrainJob, folder: RunFolder):
        self._trainer, self._job, self._folder = trainer, job, folder
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()  # lines by pod
        self._threads: dict[str, threading.Thread] = {}
        self._places: dict[int, Path] = {}
        log = folder.pods_log
        with suppress(OSError), folder.open(log) as file:
            for line in file:
                if found := re.match(rb"\[pod/([\w.-]+)/", line):
                    self._written[found[1].decode()] += 1

    def follow(self, pods: Mapping[int, str]) -> None:
        """Follows the pods that are not followed yet, and those whose connection has ended."""
        for node, pod in pods.items():
            if pod not in self._threads or not self._threads[pod].is_alive():
                self._threads[pod] = threading.Thread(target=self._read, args=(node, pod), daemon=True)
                self._threads[pod].start()

    def end(self, pods: Mapping[int, str]) -> None:
        """Waits for the last lines of a job that has ended, and reads again what a connection has missed."""
        last = time.monotonic() + _LAST_LINES
        for node, pod in pods.items():
            self._threads[pod].join(max(0.0, last - time.monotonic()))
            if not self._threads[pod].is_alive():
                self._read(node, pod, follow=False)

    def _read(self, node: int, pod: str, follow: bool = True) -> None:
        known = self._written[pod]
        with suppress(Exception):  # the connection has ended, and is made again
            lines = self._trainer.get_job_logs(self._job.name, step=f"node-{node}", follow=follow)
            for number, line in enumerate(lines):
                if number >= known:
                    self._write(node, pod, line)

    def _write(self, node: int, pod: str, line: str) -> None:
        with self._lock:
            self._written[pod] += 1
            _append(self._folder.pods_log, f"[pod/{pod}/node] {line}\n")
            found = _OF_RANK.match(line)
            if found and int(found[1]) < self._job.per_node:
                rank = node * self._job.per_node + int(found[1])
                _append(self._place(rank), line[found.end() :].removeprefix(" ") + "\n")

    def _place(self, rank: int) -> Path:
        if rank not in self._places:
            place = self._folder.logs / "kubeflow" / "attempt_0" / str(rank)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._places[rank] = place / "stdout.log"
        return self._places[rank]


def _append(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
        file.write(text)


# ---- following a job


_FIRST, _LONGEST, _GROWTH = 1.0, 10.0, 1.2  # seconds between two questions
_LAST_LINES = 10.0  # seconds in which the last lines of pods arrive after the end


def main(run_dir: str, text: str) -> int:
    job, folder = msgspec.json.decode(text, type=TrainJob), RunFolder(run_dir)
    signal.signal(signal.SIGTERM, lambda *_: _stop(job, folder))
    try:
        trainer = client(job.namespace, job.context)
    except ClusterError as error:
        print(f"TrainJob {job.name} cannot be followed: {error}", file=sys.stderr, flush=True)
        return 1
    pods, writer = _Pods(trainer, job, folder), Writer(folder.system)
    known, pause = Seen(""), _FIRST
    while True:
        try:
            found = seen(trainer, job)
        except ClusterError as error:
            found = replace(known, state=known.state or "Created", reason=f"the cluster does not answer: {error}")
        pods.follow(found.pods)
        if (found.state, found.reason) != (known.state, known.reason):
            writer.write("queue", job=job.name, scheduler="Kubeflow", state=found.state, reason=found.reason, nodes="")
            known, pause = found, _FIRST
        if found.state in ENDED:
            pods.end(found.pods)
            return _ended(job, folder, found)
        time.sleep(pause)
        pause = min(pause * _GROWTH, _LONGEST)


def _stop(job: TrainJob, folder: RunFolder) -> NoReturn:
    cancel(job, folder)
    os._exit(130)  # no thread that reads from a pod delays it


def _ended(job: TrainJob, folder: RunFolder, found: Seen) -> int:
    """The exit code; the last line that is printed says why a job has failed."""
    if found.state == "Complete":
        return 0
    why = f"TrainJob {job.name} " + ("is gone: it was deleted" if found.state == "Gone" else "failed")
    with suppress(Exception):  # there are no logs, or nothing can be read in them
        why += f": {explain([read_log(folder.pods_log)]).findings[0].title}"
    if found.state == "Failed" and found.reason:
        why += f" ({found.reason})"
    print(visible_line(why), file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # no thread that reads from a pod delays it
