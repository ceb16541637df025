"""A small web service for the file that ``gsplit infer`` wrote. A request reads one row of a memory map.

gsplit infer demo8.gsplit --weights run --out predictions.npy
python examples/serve.py predictions.npy --port 8000
curl http://127.0.0.1:8000/vertex/17

The response is JSON: the class with the highest output, its probability, and all outputs. The file is memory-mapped, so
the service starts immediately for any size, and processes of one host share its pages. It listens on the loopback
address and has no authentication: put a reverse proxy in front of it for public access.
"""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class Service(ThreadingHTTPServer):
    """An HTTP server for the outputs of all vertices."""

    def __init__(self, path: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), Answer)
        self.outputs: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)


class Answer(BaseHTTPRequestHandler):
    """GET /vertex/ID, and GET /health."""

    server: Service

    def do_GET(self) -> None:
        outputs = self.server.outputs
        wanted = re.fullmatch(r"/vertex/([0-9]{1,18})", self.path)
        if self.path == "/health":
            self._send(200, {"num_vertices": len(outputs), "num_outputs": outputs.shape[1]})
        elif wanted is None:
            self._send(404, {"error": "ask for /vertex/ID or /health"})
        elif (vertex := int(wanted[1])) >= len(outputs):
            self._send(404, {"error": f"expected a vertex in 0..{len(outputs) - 1} (got {vertex})"})
        else:
            row = outputs[vertex].astype(np.float64)
            exponents = np.exp(row - row.max())
            probability = exponents / exponents.sum()
            best = int(row.argmax())
            found = {"vertex": vertex, "class": best, "probability": float(probability[best]), "outputs": row.tolist()}
            self._send(200, found)

    def _send(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", type=Path, help="a .npy file with a row per vertex")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    options = parser.parse_args()
    with Service(options.outputs, options.port) as service:
        host, port = service.server_address[:2]
        print(f"serving {len(service.outputs):,} vertices on http://{host!s}:{port}/vertex/ID", flush=True)
        service.serve_forever()


if __name__ == "__main__":
    main()
