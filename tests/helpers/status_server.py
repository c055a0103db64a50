"""A status server of Kubeflow Trainer: HTTPS with a certificate of its own authority, a token, and the checks of the
TrainJob's CustomResourceDefinition."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

import jsonschema

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/ddp/status"
_SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "trainer_status.json").read_text())


class StatusServer(ThreadingHTTPServer):
    """What it accepted, each with the time of its arrival; `answers` replaces its answer; `hang` answers never."""

    daemon_threads = True

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.got: list[tuple[float, dict[str, Any]]] = []
        self.refused: list[int] = []
        self.hang: threading.Event | None = None

    def handle_error(self, *_: Any) -> None:
        """A client that does not accept the certificate ends the connection; nothing on the terminal."""

    def judge(self, handler: _Handler) -> tuple[int, str]:
        """The code and the message of the answer to a request."""
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.headers["Authorization"] != f"Bearer {self.token}":
            return 403, "Forbidden"
        if handler.path != PATH:
            return 404, "Not found"
        document = json.loads(body)
        try:
            jsonschema.validate(document, _SCHEMA)
            datetime.fromisoformat(document["trainerStatus"]["lastUpdatedTime"])
        except (jsonschema.ValidationError, ValueError) as error:
            return 422, str(error)
        self.got.append((monotonic(), document["trainerStatus"]))
        return 200, ""


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        if self.server.hang:
            self.server.hang.wait()
        code, message = self.server.judge(self)
        if code != 200:
            self.server.refused.append(code)
        answer = json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": code}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@contextmanager
def status_server(folder: Path, token: str = "a-token") -> Iterator[tuple[StatusServer, dict[str, str]]]:
    """A server, and the variables of a pod that reports to it. `folder` is for its certificate and the token."""
    certificate, key = folder / "ca.crt", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "token").write_text(f"{token}\n")
    server = StatusServer(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{server.server_port}{PATH}",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate),
    }
    try:
        yield server, variables
    finally:
        if server.hang:
            server.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()
