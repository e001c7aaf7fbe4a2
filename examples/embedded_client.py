"""A small service inside a hospital: it takes the coordinator's sealed plans and gives sealed answers back.

    python examples/embedded_client.py client.toml --port 8461 [--passphrase-file FILE] [--model-out DIR]

POST a plan to / and the answer is the body of the response. What may leave is decided by the hospital's own
policy file, and what left is in its ledger; this program only moves bytes. `three_hospitals.py` lays out
three such hospitals and plays the coordinator. A service that others can reach belongs behind TLS.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import securefl
from securefl.crypto.envelope import DEFAULT_LIMITS, read_header
from securefl.crypto.keyfiles import read_passphrase
from securefl.errors import AwaitingApproval, Cancelled, ProtocolError, SecureflError

log = logging.getLogger("hospital")


class Hospital(ThreadingHTTPServer):
    """The service; threads that are given plans take turns in the client."""

    def __init__(self, port: int, client: securefl.Client, model_out: Path | None) -> None:
        super().__init__(("127.0.0.1", port), Plans)
        self.client = client
        self.model_out = model_out

    def keep_model(self, answer: bytes) -> None:
        """After the last step of the run, the model is the silo's to use."""
        if self.model_out is not None and read_header(answer).step == "finish":
            self.client.save_model(self.model_out)
            log.info("the trained model is in %s", self.model_out)


class Plans(BaseHTTPRequestHandler):
    """One request is one plan."""

    server: Hospital
    timeout = 60  # seconds that a slow sender may keep a thread

    def do_POST(self) -> None:
        """Answer a plan; nothing of why it failed goes back but the kind of failure."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            return self._reply(411, b"")
        if int(length) > DEFAULT_LIMITS.max_envelope:
            return self._reply(413, b"")
        try:
            answer = self.server.client.handle(self.rfile.read(int(length)))
            self.server.keep_model(answer)
            return self._reply(200, answer)
        except (AwaitingApproval, Cancelled) as later:
            log.warning("%s", later)
            return self._reply(503, b"")
        except ProtocolError as error:
            log.warning("refused a message: %s", error)
            return self._reply(400, b"")
        except SecureflError as error:  # a full disk, a ledger that does not hold
            log.error("%s", error)
            return self._reply(500, b"")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "60")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.info(format, *args)


def main() -> int:
    """Run until SIGTERM or Ctrl-C; a training that runs then ends between two steps and nothing is sent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--port", type=int, default=8461)
    parser.add_argument("--passphrase-file", type=Path)
    parser.add_argument("--model-out", type=Path, help="folder for the trained model")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stop = threading.Event()
    try:
        config = securefl.load_config(arguments.config)
        file = arguments.passphrase_file
        passphrase = None if file is None else read_passphrase(file, str)
        identity = securefl.Identity.load(Path(securefl.client_terms(config).identity), passphrase)
        client = securefl.open_client(config, identity, cancelled=stop.is_set)
        service = Hospital(arguments.port, client, arguments.model_out)
    except (SecureflError, OSError) as error:
        log.error("%s", error)
        return error.exit_code if isinstance(error, SecureflError) else 1

    def end(*_: object) -> None:
        stop.set()
        threading.Thread(target=service.shutdown).start()  # it waits for the loop that this signal interrupts

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    log.info("%s listens on port %d", identity.name, service.server_port)
    service.serve_forever()
    service.server_close()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
