"""A whole federation in one process: real models, keys, envelopes and ledgers over the in-memory transport.

Used by `securefl simulate` and `securefl demo`, and by researchers as an API. It plays every party, so it
alone may see the rows and the results of all; what it writes for the auditor is in `recording`.
"""

from __future__ import annotations

import copy
import math
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import check_cohort
from securefl.client import ORDER, Client
from securefl.config import ARRIVING, Config
from securefl.crosslm_worker import CrossLmWorker
from securefl.crypto.identity import Identity
from securefl.data import Corpus
from securefl.dp_terms import run_claim
from securefl.feasibility import refuse_impossible
from securefl.ledger import Ledger
from securefl.local import SiloData, derive_seed
from securefl.messages import Step
from securefl.methods.averaging import sgd_step
from securefl.model_card import model_card
from securefl.privacy import noise_source
from securefl.recording import RunFolder, ledger_facts, link_duplicates
from securefl.result import ClientRow, LanguageRow, Result, RoundRow, ServerRow, SumRow, versions
from securefl.scoring import macro_f1, paired_difference, wilson
from securefl.simulated_lanes import (
    ARRIVAL_UNITS,
    EVALUATION_UNITS,
    LaneRun,
    check_speeds,
    load_worker,
)
from securefl.simulated_policy import simulated_policy
from securefl.simulated_rounds import RoundRun
from securefl.slm import Slm
from securefl.training import batch_gradient, first_batch
from securefl.transport.memory import Meddler, MemoryTransport
from securefl.workbench import TrainingMemo, Workbench

SERVER = "server"
LIBRARIES = (
    "securefl",
    "torch",
    "transformers",
    "peft",
    "opacus",
    "dp-accounting",
    "sentence-transformers",
    "cryptography",
    "numpy",
)
Progress = Callable[[float, str], None]


def _quiet(amount: float, what: str) -> None:
    """The progress of a caller who wants none."""


def work_units(config: Config, silos: int) -> float:
    """How much work a run is, in local passes of one silo: the total of the progress that it reports."""
    epochs = [config.round_epochs(number) for number in range(1, config.federation.rounds + 1)]
    passes = sum(epochs)
    twice = config.federation.method != "standalone" or config.privacy.dp_sgd is not None
    total = float(passes * silos) * (2 if twice else 1)
    if config.federation.method == "fedkc" and config.fedkc.source == "peers":
        total += float(sum(epochs[1:]) * silos)
    if config.federation.method in ARRIVING:
        total += ARRIVAL_UNITS * silos * config.federation.rounds + EVALUATION_UNITS
    return total


@dataclass
class Simulation:
    """One run of one method.

    config, corpus: what and on whose rows. out: the folder to make (see `recording`). workbench: shared
    between runs. memo: where finished trainings are kept, by default inside the run. meddler: what an
    attacker does to answers on the wire (tests). progress: called with (units done, what). compare: answers
    of earlier runs on the same test rows, by name. answers: (silos, n) right or wrong, after `run`.
    """

    config: Config
    corpus: Corpus
    out: Path | str
    workbench: Workbench = field(default_factory=Workbench)
    memo: TrainingMemo | None = None
    resume: bool = False
    meddler: Meddler | None = None
    progress: Progress = _quiet
    name: str | None = None
    compare: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        self.clients: dict[str, Client] = {}
        self.folder = RunFolder(self.out, self.resume)
        refuse_impossible(self.config, self.corpus)
        check_speeds(self.config, self.corpus)

    # --- before anything runs

    def _load_models(self) -> CrossLmWorker | None:
        """Load every checkpoint, and the server's LLM where there is one: what is unusable shows first."""
        for name in dict.fromkeys(self.config.slm.models):
            self.workbench.slm(name, self.corpus.labels, self.config)
        if self.config.federation.method not in ARRIVING:
            return None
        return load_worker(self.config, self.corpus.labels)

    def _check_noise(self) -> None:
        """Whether the noise of the configuration fits the models, before anything is trained."""
        if self.config.privacy.models is not None:
            slm, _ = self.workbench.slm(self.config.slm.models[0], self.corpus.labels, self.config)
            length = sum(math.prod(shape) for shape in slm.shapes().values())
            check_cohort(self.config, len(self.corpus.train), length)

    def _silent(self, name: str, number: int, step: Step) -> bool:
        """Whether the configuration has a silo fall silent before its answer to this step."""
        drop = self.config.federation.drop.get(name)
        if drop is None or drop.round not in (None, number):
            return False
        return ORDER.index(step) >= ORDER.index(drop.step)

    def _make_clients(self, run: str, server: Identity) -> None:
        config, corpus = self.config, self.corpus
        identities = {name: Identity.generate(name) for name in corpus.train}
        cards = {name: identity.card for name, identity in identities.items()}
        models = config.slm.models
        for index, (name, identity) in enumerate(identities.items()):
            slm, base = self.workbench.slm(models[index % len(models)], corpus.labels, config)
            peers = [card.fingerprint for other, card in cards.items() if other != name]
            policy = simulated_policy(config, name, server.card.fingerprint, peers, base)
            self.folder.text(f"policy/{name}.toml", policy.to_toml())
            self.folder.text(f"cards/{name}.json", identity.card.model_dump_json(indent=2))
            ledger_path = self.folder.path / "ledger" / f"{name}.jsonl"
            ledger_path.parent.mkdir(exist_ok=True)
            self.clients[name] = Client(
                identity=identity,
                server=server.card,
                roster={other: card for other, card in cards.items() if other != name},
                policy=policy,
                ledger=Ledger.create(ledger_path, identity, clock=time.time),
                config=config,
                run=run,
                data=SiloData(corpus.train[name], corpus.validation[name]),
                dataset=name,
                slm=slm,
                base_sha256=base,
                clock=time.time,
                train=self.memo or TrainingMemo(self.folder.state),
                noise=noise_source(derive_seed(config.federation.seed, name, "noise")),
                witness=self.folder.witness,
            )
        self.folder.text(f"cards/{SERVER}.json", server.card.model_dump_json(indent=2))

    # --- the run

    def run(self) -> Result:
        """Run it, write the folder, give back what result.json says.

        Raises Refused where the silos' policies stopped the run, ProtocolError where too few answers were
        admitted. An interrupted run leaves OUT.partial, which `resume` continues.
        """
        started = time.monotonic()
        worker = self._load_models()
        self._check_noise()
        self.folder.open()
        run = secrets.token_hex(16)
        identity = Identity.generate(SERVER)
        self._make_clients(run, identity)
        self.folder.truth(self.corpus)
        method = self.config.federation.method
        baseline = self._train_alone()
        server_row, sums = ServerRow(), list[SumRow]()
        transport = MemoryTransport(
            {name: client.handle for name, client in self.clients.items()}, self.meddler
        )
        if method == "standalone":
            rounds = [
                RoundRow(round=n + 1, seconds=0.0, bytes_up=0, bytes_down=0)
                for n in range(self.config.federation.rounds)
            ]
            for name, client in self.clients.items():
                client.slm.load_state(baseline[name].state())
            if self.config.privacy.dp_sgd is not None:
                self._train_privately()
        elif worker is not None:
            lanes = LaneRun(
                config=self.config,
                corpus=self.corpus,
                workbench=self.workbench,
                clients=self.clients,
                identity=identity,
                run=run,
                transport=transport,
                worker=worker,
                folder=self.folder,
                silent=self._silent,
                progress=self.progress,
            )
            rounds, server_row = lanes.play()
        else:
            federated = RoundRun(
                config=self.config,
                corpus=self.corpus,
                workbench=self.workbench,
                clients=self.clients,
                identity=identity,
                run=run,
                transport=transport,
                folder=self.folder,
                silent=self._silent,
                progress=self.progress,
            )
            rounds, server_row, sums = federated.play()
        result = self._result(run, rounds, server_row, baseline, transport, started)
        result = result.model_copy(update={"sums": sums})
        self._write_models(result)
        self.folder.text("result.json", result.to_json())
        self._write_report(result)
        self.folder.finish()
        return result

    def _write_report(self, result: Result) -> None:
        from securefl.report.render import (
            write_run_report,  # matplotlib is slow to load and not needed before
        )

        write_run_report(result, self.folder.path / "report.html")

    def _train_alone(self) -> dict[str, Slm]:
        """Each silo's model after the same local passes or steps with nothing exchanged: the baseline."""
        # Of every method the same: what a method adds to the loss is no part of it.
        federation = self.config.federation.model_copy(update={"method": "standalone"})
        # Alone nothing leaves, so nobody would train with noise.
        privacy = self.config.privacy.model_copy(update={"dp_sgd": None})
        config = self.config.model_copy(update={"federation": federation, "privacy": privacy})
        alone = {}
        for name, client in self.clients.items():
            slm = copy.deepcopy(client.slm)
            for number in range(1, self.config.federation.rounds + 1):
                seed = derive_seed(self.config.federation.seed, name, number, "train")
                epochs = self.config.round_epochs(number)
                if self.config.sends_gradients:
                    batch = first_batch(client.data.train, config.slm.batch_size, seed)
                    step = sgd_step(slm.state(), batch_gradient(slm, batch), config.step_rate)
                    slm.load_state(step)
                else:
                    client.train(slm, client.data.train, config, epochs, seed, client.noise)
                self.progress(epochs, f"{name} trains alone, round {number}")
            alone[name] = slm
        return alone

    def _train_privately(self) -> None:
        """Each silo by itself as a federation would train it: what privacy costs when nothing else does."""
        for name, client in self.clients.items():
            client.slm.load_state(
                self.workbench.slm(client.slm.name, self.corpus.labels, self.config)[0].state()
            )
            for number in range(1, self.config.federation.rounds + 1):
                seed = derive_seed(self.config.federation.seed, name, number, "train")
                epochs, noise = self.config.round_epochs(number), client.noise.for_purpose(number, "train")
                client.train(client.slm, client.data.train, self.config, epochs, seed, noise)
                self.progress(epochs, f"{name} trains alone by DP-SGD, round {number}")

    # --- the result

    @property
    def _training(self) -> dict[str, Any] | None:
        """The claim on what was made of all the run's trainings, for each silo alike."""
        claim = run_claim(
            self.config, self.config.federation.rounds, noise_source(self.config.federation.seed)
        )
        return None if claim is None else claim.model_dump(mode="json")

    def _result(
        self,
        run: str,
        rounds: list[RoundRow],
        server: ServerRow,
        alone: Mapping[str, Slm],
        transport: MemoryTransport,
        started: float,
    ) -> Result:
        test = self.corpus.test
        said = {name: self.workbench.said(client.slm, test) for name, client in self.clients.items()}
        right = {name: np.asarray(found == test.labels) for name, found in said.items()}
        base = {name: self.workbench.answers(slm, test) for name, slm in alone.items()}
        method, seed = self.config.federation.method, self.config.federation.seed
        self.answers = np.stack(list(right.values()))
        difference = None
        if method != "standalone":
            difference = paired_difference(self.answers, np.stack(list(base.values())), seed)
        return Result(
            method=method,
            name=self.name or method,
            run=run,
            seed=self.config.federation.seed,
            config=self.config.model_dump(mode="json"),
            rounds=rounds,
            clients=[
                self._client_row(client, said[name], base[name], transport.bytes_up.get(name, 0))
                for name, client in self.clients.items()
            ],
            server=server,
            difference=difference,
            against={
                name: paired_difference(self.answers, other, seed) for name, other in self.compare.items()
            },
            test_rows=len(test),
            shared_units=self.corpus.shared_units,
            seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=peak_memory(),
            versions=versions(LIBRARIES),
        )

    def _client_row(
        self, client: Client, said: NDArray[np.int64], base: NDArray[np.bool_], sent: int
    ) -> ClientRow:
        name, right = client.identity.name, said == self.corpus.test.labels
        labels = self.corpus.labels
        counts = np.bincount(client.data.train.labels, minlength=len(labels))
        return ClientRow(
            name=name,
            model=client.slm.name,
            train_rows=len(client.data.train),
            validation_rows=len(client.data.validation),
            labels={label: int(count) for label, count in zip(labels, counts, strict=True)},
            test_accuracy=float(right.mean()),
            test_interval=wilson(right),
            baseline_accuracy=float(base.mean()),
            test_macro_f1=macro_f1(said, self.corpus.test.labels),
            languages=self._languages(said, base),
            **ledger_facts(client.ledger, self.folder.path / "releases" / name),
            training=self._training,
            bytes_up=sent,
            kept_candidate=client.kept_candidate,
        )

    def _languages(self, said: NDArray[np.int64], base: NDArray[np.bool_]) -> dict[str, LanguageRow]:
        """A model's figures on the test rows of each language; base: the answers of its baseline."""
        test, found = self.corpus.test, {}
        trained = Counter(language for rows in self.corpus.train.values() for language in rows.languages)
        spoken = np.array(test.languages, object)
        for language in sorted(set(test.languages)):
            rows = np.flatnonzero(spoken == language)
            right = said[rows] == test.labels[rows]
            found[language] = LanguageRow(
                rows=len(rows),
                accuracy=float(right.mean()),
                interval=wilson(right),
                macro_f1=macro_f1(said[rows], test.labels[rows]),
                baseline_accuracy=float(base[rows].mean()),
                train_rows=trained[language],
            )
        return found

    def _write_models(self, result: Result) -> None:
        for row in result.clients:
            slm = self.clients[row.name].slm
            folder = self.folder.path / "models" / row.name
            folder.parent.mkdir(exist_ok=True)
            slm.save(folder, model_card(slm, row, result))
        link_duplicates(sorted((self.folder.path / "models").glob("*/model.safetensors")))


def peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
