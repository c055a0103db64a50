"""The API server of a cluster with Kubeflow Trainer, for its SDK: a real HTTP server on loopback that stores TrainJobs,
and a controller that starts the command of each node as a process, with the environment that Trainer gives a pod."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "team"
_JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
_RUNTIMES = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"}},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                            "spec": {
                                "template": {"spec": {"containers": [{"name": "node", "image": "pytorch/pytorch"}]}}
                            },
                        },
                    }
                ]
            }
        },
    },
}


class Pod:
    """One node of a TrainJob: its process, and the file with its output."""

    def __init__(self, job: dict[str, Any], node: int, place: Path, port: int, programs: Path):
        trainer = job["spec"]["trainer"]
        self.job, self.node = job["metadata"]["name"], node
        self.name = f"{self.job}-node-0-{node}-x{node}yz"
        self.log = place / f"{self.name}.log"
        self.was_read = False
        home = place / self.name
        home.mkdir()
        command = [word.replace("$$", "$") for word in trainer["command"]]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
        environment |= {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": "auto",
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def phase(self) -> str:
        code = self.process.poll()
        return "Running" if code is None else "Failed" if code else "Succeeded"

    def end(self) -> None:
        """Ends it as Kubernetes ends a pod."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    @property
    def document(self) -> dict[str, Any]:
        labels = {
            "jobset.sigs.k8s.io/jobset-name": self.job,
            "jobset.sigs.k8s.io/replicatedjob-name": "node",
            "batch.kubernetes.io/job-completion-index": str(self.node),
        }
        return {
            "metadata": {"name": self.name, "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"containers": [{"name": "node", "image": "pytorch/pytorch"}]},
            "status": {"phase": self.phase},
        }


class Cluster(ThreadingHTTPServer):
    """The API server. `jobs` and `pods` are by name; `refuses` is a message with which it refuses new jobs, `waits`
    keeps their pods from starting, and `breaks` ends the first connection to each log after so many lines."""

    daemon_threads = True

    def __init__(self, place: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.place, self.programs = place, place / "bin"
        self.programs.mkdir()
        pip = self.programs / "pip"  # what the job needs is installed
        pip.write_text("#!/bin/sh\necho Requirement already satisfied\n")
        pip.chmod(0o755)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self.created: list[dict[str, Any]] = []
        self.refuses, self.waits, self.breaks = "", False, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Stores a job, and starts its pods."""
        job["metadata"] |= {
            "namespace": NAMESPACE,
            "creationTimestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self.created.append(json.loads(json.dumps(job)))
        self.jobs[job["metadata"]["name"]] = job
        if not self.waits:
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                port = listening.getsockname()[1]
            for node in range(job["spec"]["trainer"]["numNodes"]):
                pod = Pod(job, node, self.place, port, self.programs)
                self.pods[pod.name] = pod
        return job

    def job(self, name: str) -> dict[str, Any] | None:
        """A job with the conditions that the controller sets."""
        job = self.jobs.get(name)
        phases = [pod.phase for pod in self.pods.values() if pod.job == name]
        if job is not None and phases and "Running" not in phases:
            failed = "Failed" in phases
            condition = {
                "type": "Failed" if failed else "Complete",
                "status": "True",
                "reason": "JobsFailed" if failed else "JobsCompleted",
                "message": "jobset failed due to one or more job failures" if failed else "jobset completed",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            job.setdefault("status", {})["conditions"] = [condition]
        return job

    def delete(self, name: str) -> None:
        """Deletes a job and ends its pods."""
        self.jobs.pop(name, None)
        for pod in [pod for pod in self.pods.values() if pod.job == name]:
            pod.end()


class _Handler(BaseHTTPRequestHandler):
    server: Cluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path, query = address.path, parse_qs(address.query)
        if path == _RUNTIMES + "torch-distributed":
            self._answer(_RUNTIME)
        elif path.startswith(f"{_JOBS}/") and (job := self.server.job(path.rpartition("/")[2])):
            self._answer(job)
        elif path == _PODS:
            name = query["labelSelector"][0].partition("jobset-name=")[2].partition(",")[0]
            pods = [pod.document for pod in self.server.pods.values() if pod.job == name and name in self.server.jobs]
            self._answer({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods})
        elif path.startswith(f"{_PODS}/") and path.endswith("/log"):
            self._stream(self.server.pods[path.split("/")[-2]], "follow" in query)
        else:
            self._refuse(404, f"{path} not found")

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != _JOBS:
            self._refuse(404, f"{self.path} not found")
        elif self.server.refuses:
            self._refuse(403, self.server.refuses)
        else:
            self._answer(self.server.create(job), 201)

    def do_DELETE(self) -> None:
        self.server.delete(self.path.rpartition("/")[2])
        self._answer({"kind": "Status", "status": "Success"})

    def _answer(self, document: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: int, message: str) -> None:
        self._answer({"kind": "Status", "status": "Failure", "message": message, "code": code}, code)

    def _stream(self, pod: Pod, follow: bool) -> None:
        """The log of a pod, as it grows."""
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines = 0
        breaks, pod.was_read = 0 if pod.was_read else self.server.breaks, True
        with pod.log.open("rb") as log:
            while not (breaks and lines >= breaks):
                over = pod.phase != "Running"
                data = log.readline()
                if data:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    lines += data.endswith(b"\n")
                elif over or not follow:
                    break
                else:
                    self.wfile.flush()
                    time.sleep(0.05)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@contextmanager
def cluster(place: Path) -> Iterator[Cluster]:
    """A cluster, and in `place` a kubeconfig for it, `config`. Its pods end with it."""
    server = Cluster(place)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": NAMESPACE}}],
        "clusters": [{"name": "test", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "a-token"}}],
    }
    (place / "config").write_text(json.dumps(config))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        for pod in server.pods.values():
            pod.end()
        server.shutdown()
        server.server_close()
        thread.join()
