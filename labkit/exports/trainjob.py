"""The status of a TrainJob: progress and metrics of a run, sent to Kubeflow Trainer while it is under way.

Trainer (2.2 and later, with its feature gate TrainJobStatus) gives each pod of a TrainJob the address of its status
server, a file with a token and one with the certificate of its authority, and stores what is sent there in the
TrainJob: `kubectl get trainjob NAME -o jsonpath='{.status.trainerStatus}'`. The protocol is that of its proposal 2779,
and the limits are those of `TrainerStatus` in its API (trainer.kubeflow.org/v1alpha1).

The supervisor of a run sends it, in a thread of its own. Whatever the server does, the run goes on.
"""

from __future__ import annotations

import http.client
import json
import math
import queue
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from labkit.analysis.metrics import seconds_left, throughput
from labkit.common.text import visible_line
from labkit.exports.figures import LOGGED, plain_name
from labkit.record.state import RunState

# ---- the server


# The names that Trainer gives its variables since 2.2, and those of the first versions of the proposal.
_PREFIXES = ("KUBEFLOW_TRAINER_SERVER", "KUBEFLOW_TRAINER_STATUS")
_PORTS = {"https": http.client.HTTPS_PORT, "http": http.client.HTTP_PORT}
_LARGEST_TOKEN = 1 << 16  # bytes


class Refused(Exception):
    """The server did not accept a status; the message is one clause with its reason."""


@dataclass(frozen=True)
class Server:
    """A status server: its address, the file of the token, which Kubernetes replaces from time to time, and the file of
    the certificate authority (empty: the system's)."""

    url: str
    token: str
    authority: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Server | None:
        """The server that an environment names; None outside of a TrainJob."""
        for prefix in _PREFIXES:
            if url := environment.get(f"{prefix}_URL"):
                return cls(url, environment.get(f"{prefix}_TOKEN", ""), environment.get(f"{prefix}_CA_CERT", ""))
        return None

    def send(self, status: Mapping[str, Any], timeout: float) -> None:
        """Sends a status, within `timeout` seconds per wait. Raises `Refused`, `OSError` or `ValueError`.

        No proxy is used and no redirection followed: the token is for this address.
        """
        address = urlsplit(self.url)
        if address.scheme not in _PORTS or not address.hostname:
            raise Refused(f"{self.url} is no address of a server; it must begin with https://")
        with open(self.token, "rb") as file:
            token = file.read(_LARGEST_TOKEN).decode("ascii").strip()
        port = address.port or _PORTS[address.scheme]
        if address.scheme == "https":
            context = ssl.create_default_context(cafile=self.authority or None)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.hostname, port, timeout=timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(address.hostname, port, timeout=timeout)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            path = address.path or "/"
            connection.request("POST", path, json.dumps({"trainerStatus": status}), headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise Refused(f"HTTP {answer.status} {_reason(answer)}")
        except http.client.HTTPException as error:
            raise Refused(f"its answer is not HTTP ({type(error).__name__})") from None
        finally:
            connection.close()


def _reason(answer: http.client.HTTPResponse) -> str:
    """Why a server refuses: the message of a Status of Kubernetes, or the words of HTTP."""
    try:
        said = json.loads(answer.read(1 << 12))
    except ValueError:
        said = None
    message = said.get("message") if isinstance(said, dict) else None
    return visible_line(str(message or answer.reason))[:200]


# ---- the status


_METRICS = 256  # most metrics of a status
_LENGTH = 64  # most characters of the name and of the value of a metric
_MOST = 2**31 - 1  # of an integer


def status_of(state: RunState, finished: bool = False) -> dict[str, Any]:
    """The status of a run: the percentage of its steps (99 until it has `finished`), the seconds that are left at the
    current pace, and its newest figures as texts. What is unknown is left out: of a run on several nodes, its
    throughput, because this folder has the ranks of one node."""
    total, left = state.total_steps, seconds_left(state)
    found: dict[str, Any] = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    if finished:
        found |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    else:
        if total:
            found["progressPercentage"] = min(99, 100 * state.step // total)
        if left is not None:
            found["estimatedRemainingSeconds"] = min(math.ceil(left), _MOST)
    values: dict[str, Any] = {
        "loss": state.loss_at(),
        "samples_per_second": throughput(state, now=True) if state.expected == state.world_size else None,
        "steps": state.step,
        "total_steps": total,
    }
    values |= {f"{LOGGED}/{plain_name(metric.name)}"[:_LENGTH]: metric.value for metric in state.metrics}
    known = {
        name: value for name, value in values.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    found["metrics"] = [{"name": name, "value": f"{value:.9g}"} for name, value in [*known.items()][:_METRICS]]
    return found


# ---- sending it while the run is under way


_EVERY = 5.0  # least seconds between two messages: what Kubeflow's own clients keep to
_RAREST = 300.0  # most seconds until another attempt, after several that failed
_TIMEOUT = 5.0  # seconds of one wait for the server
_LAST_TIMEOUT = 3.0  # seconds of one wait at the end of a run
_AT_THE_END = 4.0  # seconds that the end of a run waits in total
_FAILED = 2  # attempts in a row after which it is said that the status does not arrive


class Reports:
    """Sends the status of a run. `say` takes one clause, once: why the status does not arrive."""

    def __init__(self, server: Server, say: Callable[[str], None]):
        self._server, self._say = server, say
        self._waiting: queue.SimpleQueue[tuple[dict[str, Any], bool]] = queue.SimpleQueue()
        self._sent = threading.Event()  # whether nothing is being sent
        self._sent.set()
        self._next = 0.0
        self._failed = 0  # attempts in a row
        self._said = False
        threading.Thread(target=self._run, daemon=True, name="status of the TrainJob").start()

    def offer(self, state: RunState) -> None:
        """Sends the status if it is time to do so, without waiting. Of several nodes, that of rank 0 sends it."""
        now = time.monotonic()
        if 0 in state.ranks and now >= self._next and self._sent.is_set():
            self._next = now + min(_EVERY * 2**self._failed, _RAREST)
            self._put(state, finished=False, last=False)

    def end(self, state: RunState, finished: bool) -> None:
        """Sends the last status of a run, and waits for it, and for one that is under way, four seconds at most."""
        if 0 in state.ranks:
            end = time.monotonic() + _AT_THE_END
            self._sent.wait(_AT_THE_END / 2)
            self._put(state, finished, last=True)
            self._sent.wait(end - time.monotonic())

    def _put(self, state: RunState, finished: bool, last: bool) -> None:
        self._sent.clear()
        self._waiting.put((status_of(state, finished), last))

    def _run(self) -> None:
        while True:
            status, last = self._waiting.get()
            try:
                self._server.send(status, _LAST_TIMEOUT if last else _TIMEOUT)
                self._failed = 0
            except (Refused, OSError, ValueError) as error:
                self._failed += 1
                if not self._said and (last or self._failed >= _FAILED):
                    self._said = True
                    self._say(f"{self._server.url}: {_words(error)}")
            self._sent.set()


def _words(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, ssl.SSLError):
        return visible_line(f"its certificate is not accepted: {error.reason or error}")
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return "the file of the token is no text"
    return visible_line(str(error) or type(error).__name__)
