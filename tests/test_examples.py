"""The examples, run as their readers would run them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from securefl.crypto import envelope
from securefl.ledger import verify_ledger
from securefl.models import load_trained
from securefl.release import PayloadKind
from tests.silos import PASSPHRASE, Laid, lay_out

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _free_port() -> int:
    """A port on which, and on the two after it, nothing listens just now."""
    for _ in range(50):
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except OSError:
                continue
            return port
    pytest.fail("no three free ports in a row")


def test_three_hospitals(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        *(sys.executable, EXAMPLES / "three_hospitals.py", "--out", out, "--model", tiny_encoder),
        *("--source", tiny_data / "train.csv", "--rows", "26", "--port", str(_free_port())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "round 2, train: hospital-b sent masked-model" in done.stdout
    assert "hospital-a: {'validation_accuracy'" in done.stdout
    assert "round 2: opened the sum of hospital-a, hospital-b, hospital-c:" in done.stdout
    for name in ("hospital-a", "hospital-b", "hospital-c"):
        releases = verify_ledger(out / name / "ledger.jsonl").releases
        masked = ["advert", "shares", "masked-model", "survivors", "unmasking"]
        assert [entry.kind.value for entry in releases] == [*masked, *masked, "metrics"]
        assert len(load_trained(out / name / "model").labels) == 2
        rows = (out / name / "rows.csv").read_text().splitlines()[1:]
        assert not any(row.split(",")[0] in done.stdout + done.stderr for row in rows), "a text was logged"
    again = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert "Traceback" not in again.stderr


@contextmanager
def _service(silo: Laid, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = _free_port()
    command = [
        sys.executable,
        EXAMPLES / "embedded_client.py",
        silo.config_file,
        "--port",
        str(port),
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/", process
    finally:
        process.kill()
        process.communicate()


def _post(url: str, data: bytes) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_service_answers_refuses_and_ends(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    silo = lay_out(tmp_path / "silo", tiny_encoder, tiny_data, passphrase=PASSPHRASE)
    secret = tmp_path / "passphrase"
    secret.write_bytes(PASSPHRASE)
    secret.chmod(0o600)
    server = silo.serve()
    with _service(silo, "--passphrase-file", str(secret)) as (url, process):
        assert _post(url, b"rubbish") == (400, b"")
        status, answer = _post(url, server.outgoing()["hospital-a"])
        assert status == 200
        assert server.receive(answer).kind is PayloadKind.MODEL
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    # Started again it still knows what it answered.
    with _service(silo, "--passphrase-file", str(secret)) as (url, process):
        assert _post(url, server.outgoing()["hospital-a"]) == (200, answer)


def test_the_service_leaves_a_waiting_plan_unanswered(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    silo = lay_out(tmp_path / "silo", tiny_encoder, tiny_data, approval="manual")
    with _service(silo) as (url, _):
        plan = silo.serve().outgoing()["hospital-a"]
        assert _post(url, plan) == (503, b"")
        (waiting,) = (silo.folder / "state").glob("*.plan")
        command = [sys.executable, "-m", "securefl", "approve", waiting.stem, "--config", silo.config_file]
        done = subprocess.run(
            [*command, "--json"], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
        )
        assert json.loads(done.stdout)["approved"] == waiting.stem, done.stderr
        status, answer = _post(url, plan)
        assert (status, envelope.read_header(answer).kind) == (200, PayloadKind.MODEL)


def test_a_wrong_passphrase_is_one_line(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    silo = lay_out(tmp_path / "silo", tiny_encoder, tiny_data, passphrase=PASSPHRASE)
    wrong = tmp_path / "passphrase"
    wrong.write_bytes(b"another")
    wrong.chmod(0o600)
    command = [sys.executable, EXAMPLES / "embedded_client.py", silo.config_file, "--passphrase-file", wrong]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "another" not in done.stderr


def test_the_figures_on_centroids_go_on_where_they_were(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, EXAMPLES / "audit_centroids.py", "--out", tmp_path / "out", "--quick", "--json"),
        *("--model", tiny_encoder, "--train", tiny_data / "train.csv", "--test", tiny_data / "test.csv"),
        *("--seeds", "2", "--audits", "2"),
    ]
    first = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    lines = json.loads(first.stdout)["figures"]
    assert first.returncode in (0, 1), first.stderr
    assert first.returncode == (json.loads(first.stdout)["missed"] > 0)
    assert {line["part"] for line in lines} == {"membership", "tokens", "mechanism", "one-run", "bag"}
    assert all(line["seeds"] == 2 for line in lines)
    # A random encoder's dictionary is as public as a trained one's: single texts are read whole.
    (single,) = [line for line in lines if line["figure"] == "recall, k = 1, noise 0"]
    assert (single["ours"], single["verdict"]) == (1.0, "met")
    again = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    assert (again.stdout, again.stderr) == (first.stdout, "")


def test_tokens_are_read_over_a_grid_that_goes_on(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, EXAMPLES / "token_recovery.py", "--out", tmp_path / "out", "--seeds", "1"),
        *("--model", tiny_encoder, "--train", tiny_data / "train.csv", "--test", tiny_data / "test.csv"),
        *("--most", "4", "--rows", "32", "--groups", "2"),
    ]
    first = subprocess.run([*command, "--json"], capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    assert first.returncode == 0, first.stderr
    made = json.loads(first.stdout)
    exact = {row["k"]: row for row in made["grid"] if row["noise"] == 0}
    assert set(exact) == {1, 2, 4}
    assert exact[1]["recall"] == exact[1]["names"] == 1.0
    assert exact[1]["names_control"] == 0.0
    assert "a layer is learnt from at least" in first.stderr
    again = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    assert "Exact centroids of a deeper layer" in again.stdout
    assert (tmp_path / "out" / "report.html").is_file()
