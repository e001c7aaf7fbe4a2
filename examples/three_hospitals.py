"""Three hospitals, each a process of its own with its own keys, policy and ledger, and a coordinator.

    python examples/three_hospitals.py [--out three-hospitals] [--rows 60] [--model builtin:minilm]
        [--rounds 2]

Lays out everything that three institutions would prepare (OUT/hospital-a, -b and -c), starts
`embedded_client.py` in each, and runs FedAvg over loopback with masked sums: the coordinator learns the
sum of their models and nothing of one. Look at the files afterwards:

    securefl ledger verify OUT/hospital-a/ledger.jsonl     what left, hash-chained and signed
    securefl predict OUT/hospital-a/model new.csv --out labels.jsonl       the trained model
    cat OUT/hospital-a/policy.toml                         what it permits, every clause with its meaning
    touch OUT/hospital-a/STOP                              the kill switch, for a run that goes on

In a real federation each institution makes its own files, and they compare fingerprints by telephone.
"""

from __future__ import annotations

import argparse
import csv
import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import securefl
from securefl.crypto.trust import TrustStore
from securefl.local import starting_slm
from securefl.models import base_fingerprint
from securefl.policy import Ceiling
from securefl.release import PayloadKind

HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")
SERVICE = Path(__file__).with_name("embedded_client.py")


def prepare(out: Path, rows: int, model: str, rounds: int, source: str) -> securefl.Identity:
    """Keys, pinned cards, policies, configurations and rows of all; gives the coordinator's identity."""
    coordinator = securefl.Identity.generate("coordinator")
    keys = {name: securefl.Identity.generate(name) for name in HOSPITALS}
    run = secrets.token_hex(16)
    corpus = securefl.load_corpus(
        securefl.parse_config(
            {
                "federation": {"method": "fedavg"},
                "data": {
                    "train": source,
                    "test": source if source.startswith("builtin:") else source.replace("train", "test"),
                    "train_rows": len(HOSPITALS) * rows,
                    "split": {"by": "dirichlet", "silos": len(HOSPITALS), "alpha": 1.0},
                },
            }
        )
    )
    for index, name in enumerate(HOSPITALS):
        folder = out / name
        folder.mkdir(parents=True)
        keys[name].save(folder / f"{name}.key")
        securefl.Ledger.create(folder / "ledger.jsonl", keys[name])
        store = TrustStore.open(folder / "trust", create=True)
        peers = [other for other in HOSPITALS if other != name]
        for card in (coordinator.card, *(keys[peer].card for peer in peers)):
            store.add(card, card.fingerprint)  # in earnest: after comparing it with its holder
        permitted = (PayloadKind.MODEL, PayloadKind.METRICS)
        securefl.Policy(
            name=name,
            servers=(coordinator.card.fingerprint,),
            base_models=(base_fingerprint(model),),
            kinds=permitted,
            nonprivate=permitted,
            model_protections=("masked",),  # nobody may read this hospital's model alone
            min_cohort=len(HOSPITALS),
            max_release_bytes=2**27,
            max_bytes_per_day=2**30,
            approval="automatic",
            datasets={"discharge-letters": Ceiling(max_epsilon=8.0, delta=1e-6)},
        ).save(folder / "policy.toml")
        mine = corpus.train[f"silo-{index + 1}"]
        with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows(zip(mine.texts, (corpus.labels[i] for i in mine.labels), strict=True))
        (folder / "client.toml").write_text(
            f"""\
[federation]
method = "fedavg"
rounds = {rounds}

[data]
train = {json.dumps(str((folder / "rows.csv").absolute()))}
labels = {json.dumps(corpus.labels)}

[slm]
models = [{json.dumps(model)}]
max_length = 48
epochs = 1

[client]
identity = "{name}.key"
trust = "trust"
server = "coordinator"
peers = {json.dumps(peers)}
run = "{run}"
dataset = "discharge-letters"
"""
        )
    return coordinator


def ask(port: int, plan: bytes) -> bytes:
    """What the hospital on that port answers to a sealed plan."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=plan)
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
        return bytes(response.read())


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until the service listens."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.3)
        else:
            return
    sys.exit("a hospital did not start; its own message is above")


def coordinate(out: Path, coordinator: securefl.Identity, ports: dict[str, int]) -> securefl.Server:
    """Run the federation; a hospital that says nothing of use is left out of the step."""
    config = securefl.load_config(out / HOSPITALS[0] / "client.toml")
    terms = securefl.client_terms(config)
    assert config.data.labels is not None
    start = starting_slm(config.slm.models[0], config.data.labels, config)
    cards = {
        name: securefl.Identity.load(out / name / f"{name}.key").card for name in HOSPITALS
    }  # in earnest: from the coordinator's own trust store
    server = securefl.Server(
        identity=coordinator,
        roster=cards,
        run=terms.run,
        config=config,
        shapes={name: start.shapes() for name in cards},
        model=start.state(),
        clock=time.time,
    )
    while not server.finished:
        for name, plan in server.outgoing().items():
            try:
                header = server.receive(ask(ports[name], plan))
            except urllib.error.HTTPError as error:
                print(f"round {server.round}, {server.step}: {name} gave no answer (HTTP {error.code})")
                continue
            print(f"round {header.round}, {header.step}: {name} sent {header.kind}")
        server.close_step()
    return server


def main() -> None:
    """Prepare, start the services, run, stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("three-hospitals"))
    parser.add_argument("--rows", type=int, default=60, help="rows a hospital, about")
    parser.add_argument("--model", default="builtin:minilm")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--source", default="builtin:bbc-news", help="where the rows come from")
    parser.add_argument(
        "--port", type=int, default=8461, help="of the first hospital; the others have the next"
    )
    arguments = parser.parse_args()
    ports = {name: arguments.port + index for index, name in enumerate(HOSPITALS)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        coordinator = prepare(
            arguments.out, arguments.rows, arguments.model, arguments.rounds, arguments.source
        )
        for name, port in ports.items():
            folder = arguments.out / name
            command = [sys.executable, SERVICE, folder / "client.toml", "--port", str(port)]
            command += ["--model-out", folder / "model"]
            processes.append(subprocess.Popen(command))
            wait_for(port, processes[-1])
        server = coordinate(arguments.out, coordinator, ports)
        for opened in server.sums:
            print(f"round {opened.round}: opened the sum of {', '.join(opened.silos)}: {opened.rows} rows")
        for name, figures in server.metrics.items():
            print(f"{name}: {figures}")
    except FileExistsError as error:
        sys.exit(f"{error.filename}: exists already; choose another --out")
    except securefl.SecureflError as error:
        sys.exit(f"three_hospitals: {error}")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
