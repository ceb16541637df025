"""An S3 server on this host (moto's), and a proxy before it that fails some requests: slow down, 500, cut connections.

``python s3_server.py`` is the server as a process of its own: it prints its port. The proxy is a thread of the test.
"""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["BUCKET", "FaultyProxy", "s3_environment", "start_s3_server"]

BUCKET = "graphs"
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
_ANSWERS = {"slow down": (503, "SlowDown"), "error": (500, "InternalError"), "denied": (403, "AccessDenied")}


def s3_environment(port: int) -> dict[str, str]:
    """The variables by which the SDK finds the server. It takes any credentials."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


@contextmanager
def start_s3_server() -> Iterator[int]:
    """A server with an empty bucket, in a process of its own; returns its port."""
    command = [sys.executable, str(Path(__file__)), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has ended, or that gave up the request, is not an error of the proxy."""


@dataclass
class FaultyProxy:
    """Passes requests on to a server, but fails some of them. ``shares``: probability of each kind of fault.

    A cut connection is one that ends in the middle of the answer. ``counts``: faults by kind; ``requests``: all of them.
    ``once``: kinds of faults of single requests, by a part of their first line.
    """

    port_of_server: int
    shares: dict[str, float] = field(default_factory=dict)
    once: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    num_bytes: int = 0
    port: int = 0

    @contextmanager
    def serve(self) -> Iterator["FaultyProxy"]:
        """Serve in threads until the block ends."""
        proxy = self
        draw = random.Random(self.seed)
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle_any(self) -> None:
                body = self._body()
                with lock:
                    proxy.requests += 1
                    line = f"{self.command} {self.path}"
                    kind = next((proxy.once.pop(part) for part in list(proxy.once) if part in line), None)
                    kind = kind or proxy._draw(draw)
                if kind in _ANSWERS:
                    self._refuse(*_ANSWERS[kind])
                else:
                    self._forward(body, cut=kind == "cut")

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                while self.rfile.readline().strip():  # trailers
                    pass
                return b"".join(chunks)

            def _refuse(self, status: int, code: str) -> None:
                text = b"" if self.command == "HEAD" else _ERROR.format(code=code).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def _forward(self, body: bytes, *, cut: bool) -> None:
                server = HTTPConnection("127.0.0.1", proxy.port_of_server, timeout=60)
                framing = ("transfer-encoding", "content-length", "expect")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in framing}
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                data = answer.read()
                server.close()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                with lock:
                    proxy.num_bytes += len(data)
                if cut:
                    self.close_connection = True

        server = _QuietServer(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def _draw(self, draw: random.Random) -> str:
        at = draw.random()
        for kind, share in self.shares.items():
            if at < share:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                return kind
            at -= share
        return "none"


def _serve() -> None:
    os.environ.update(s3_environment(0))
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    print(port, flush=True)
    while os.getppid() == int(sys.argv[1]):  # ends with the process that started it
        threading.Event().wait(0.5)
    os._exit(0)


if __name__ == "__main__":
    _serve()
