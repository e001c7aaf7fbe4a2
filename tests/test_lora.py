"""Adapters of the small models: what trains and travels, what is saved, and a run over them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForTokenClassification, AutoTokenizer

from attacks.runs import Run, open_recorded
from securefl.config import Config, Lora, parse_config
from securefl.data import load_corpus
from securefl.errors import ConfigError, ModelError, WrongShape
from securefl.local import starting_slm, train_locally
from securefl.methods.averaging import weighted_mean
from securefl.models import load_slm, load_trained
from securefl.privacy import noise_source
from securefl.release import PayloadKind, encode, fingerprint
from securefl.slm import Slm
from securefl.training import embed, probabilities
from securefl.workbench import TrainingMemo, Workbench
from tests import tiny
from tests.federation import tiny_config
from tests.test_models import LABELS, TEXTS, check_the_encoder_runs_from_every_layer, folder  # noqa: F401
from tests.test_simulation import numbers, run
from tests.test_training import differ, rows_of

RANK = 3
ROWS = rows_of(tiny.make_texts(48))


def load(encoder: Path | str, seed: int = 0, lora: Lora | None = Lora(r=RANK)) -> Slm:
    return load_slm(str(encoder), LABELS, max_length=16, train_embeddings=False, seed=seed, lora=lora)


def config_of(encoder: Path, data: Path, **slm: object) -> Config:
    """Sealed, so that an average of models is one to the bit of float32."""
    terms = {"lora": {"r": RANK}, "learning_rate": 5e-3, **slm}
    return tiny_config(encoder, data, slm=terms, protection={"models": "sealed"})


def trained(config: Config, seed: int = 0) -> Slm:
    slm = starting_slm(config.slm.models[0], ("a", "b"), config)
    train_locally(slm, ROWS, config, 3, seed, noise_source(0))
    return slm


def logits(slm: Slm) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = slm(slm.tokenize(TEXTS))
    return out


def plain_logits(saved: Path) -> torch.Tensor:
    """Nothing but transformers, as the model card shows it."""
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForTokenClassification.from_pretrained(saved).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        token_logits = model(**batch).logits
    mask = batch["attention_mask"].unsqueeze(-1)
    mean: torch.Tensor = (token_logits * mask).sum(1) / mask.sum(1)
    return mean


def test_only_adapter_and_head_train_and_travel(tiny_encoder: Path) -> None:
    """BERT of 2 layers of width 32: 6 linear layers each, query, key, value, output and the MLP's two."""
    slm = load(tiny_encoder)
    sizes = {
        **dict.fromkeys(("query", "key", "value", "attention.output.dense"), (32, 32)),
        "intermediate.dense": (32, 64),
        "r.0.output.dense": (64, 32),
    }
    adapters = [name for name in slm.trained_names() if not name.startswith("classifier.")]
    assert set(slm.trained_names()) - set(adapters) == {"classifier.weight", "classifier.bias"}
    assert len(adapters) == 2 * 6 * 2
    for part, (wide, out) in sizes.items():
        found = {name.split(".lora_")[1]: slm.shapes()[name] for name in adapters if f"{part}.lora_" in name}
        assert found == {"A.default.weight": (RANK, wide), "B.default.weight": (out, RANK)}, part
    before = {name: p.detach().clone() for name, p in slm.model.named_parameters()}
    config = parse_config({"federation": {"method": "fedavg"}, "data": {"train": "a"}})
    train_locally(slm, ROWS, config, 2, 0, noise_source(0))
    moved = {name for name, p in slm.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(slm.trained_names()) == set(slm.state())


def test_it_serves_every_architecture(folder: Path) -> None:  # noqa: F811 - the fixture
    """Its layers are found, it begins as the bare model, and FedKC's embeddings stay the checkpoint's."""
    slm, bare = load(folder), load(folder, lora=None)
    names = slm.trained_names()
    linear = [
        name
        for name, layer in bare.model.base_model.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.startswith("embeddings.")
    ]
    assert sum(".lora_A." in name for name in names) == len(linear) >= 8
    inside = [name for name in names if name.startswith(f"{slm.model.base_model_prefix}.")]
    assert all(".lora_" in name and ".embeddings." not in name for name in inside)
    assert all(".lora_" not in name for name in set(names) - set(inside))
    assert torch.equal(logits(slm), logits(bare))
    state = {name: array + 0.1 for name, array in slm.state().items()}
    slm.load_state(state)
    assert (logits(slm) - logits(bare)).abs().max() > 1e-2
    check_the_encoder_runs_from_every_layer(slm)
    batch = slm.tokenize(TEXTS)
    assert torch.equal(slm.layer(batch, 0), bare.layer(batch, 0))


def test_the_scale_is_alpha_over_r(tiny_encoder: Path) -> None:
    """One layer by hand: W x + b + (alpha / r) B A x; alpha unset is 2 r."""
    x = torch.linspace(0, 1, 32)  # sums to 16
    for lora, scale in ((Lora(r=4), 2.0), (Lora(r=4, alpha=2), 0.5)):
        slm = load(tiny_encoder, lora=lora)
        slm.load_state({name: np.full_like(array, 0.01) for name, array in slm.state().items()})
        bare = load(tiny_encoder, lora=None).model.base_model.encoder.layer[0].attention.self.query
        layer = slm.model.base_model.encoder.layer[0].attention.self.query
        with torch.no_grad():
            added = layer(x) - bare(x)
        expected = torch.full((32,), scale * 4 * 0.01**2 * 16)  # an entry of B A is r * 0.01 ** 2
        torch.testing.assert_close(added, expected, atol=1e-6, rtol=0)


def test_the_first_adapter_is_of_the_seed(tiny_encoder: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load(tiny_encoder, seed=3).state()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    again, other = load(tiny_encoder, seed=3).state(), load(tiny_encoder, seed=4).state()
    assert differ(first, again) == []
    fresh = [name for name in first if ".lora_A." in name]
    assert set(fresh) < set(differ(first, other))
    assert all(first[name].any() for name in fresh)
    assert not any(first[name].any() for name in first if ".lora_B." in name)


def test_saved_it_is_the_plain_model(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = config_of(tiny_encoder, tiny_data)
    slm = trained(config)
    before, state = logits(slm), slm.state()
    learned = [np.abs(array).max() for name, array in state.items() if ".lora_B." in name]
    assert min(learned) > 1e-3
    slm.save(tmp_path / "out", "# Card\n")
    assert torch.equal(logits(slm), before), "saving leaves the model as it is"
    assert differ(state, slm.state()) == []
    bare = starting_slm(str(tiny_encoder), ("a", "b"), config_of(tiny_encoder, tiny_data, lora=None))
    bare.save(tmp_path / "bare", "# Card\n")
    names = {}
    for which in ("out", "bare"):
        with safe_open(tmp_path / which / "model.safetensors", "np") as file:
            names[which] = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert names["out"] == names["bare"], "the tensors of the plain architecture"
    left, right = (json.loads((tmp_path / which / "config.json").read_text()) for which in ("out", "bare"))
    assert left == right
    assert not list((tmp_path / "out").glob("*adapter*"))
    assert (logits(load_trained(tmp_path / "out")) - before).abs().max() < 1e-5
    assert (plain_logits(tmp_path / "out") - before).abs().max() < 1e-5
    assert (plain_logits(tmp_path / "bare") - before).abs().max() > 1e-2
    test = tiny.make_texts(40, seed=9)
    right_ones = probabilities(slm, [text for text, _ in test]).argmax(1) == rows_of(test).labels
    assert right_ones.mean() > 0.9


def test_every_architecture_is_saved_merged(folder: Path, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    slm = load(folder)
    rng = np.random.default_rng(0)
    slm.load_state({k: v + rng.normal(0, 0.05, v.shape).astype(np.float32) for k, v in slm.state().items()})
    slm.save(tmp_path / "out", "# Card\n")
    assert (plain_logits(tmp_path / "out") - logits(slm)).abs().max() < 1e-5


def test_states_are_loaded_and_averaged(tiny_encoder: Path, tiny_data: Path) -> None:
    config = config_of(tiny_encoder, tiny_data)
    one, two = trained(config, seed=1), trained(config, seed=2)
    mean = weighted_mean({"a": one.state(), "b": two.state()}, {"a": 1.0, "b": 3.0})
    slm = starting_slm(config.slm.models[0], ("a", "b"), config)
    slm.load_state(mean)
    for name, array in slm.state().items():
        expected = 0.25 * one.state()[name].astype(np.float64) + 0.75 * two.state()[name]
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-9)
    twin = starting_slm(config.slm.models[0], ("a", "b"), config)
    twin.load_state(one.state())
    assert torch.equal(logits(twin), logits(one)), "the state and the checkpoint are the whole model"
    for terms in ({"r": 4}, None):
        other = config_of(tiny_encoder, tiny_data, lora=terms)
        stranger = starting_slm(config.slm.models[0], ("a", "b"), other)
        with pytest.raises(WrongShape):
            slm.load_state(stranger.state())


def test_the_workbench_tells_adapters_apart(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Models with the same tensors and another scale are other models, for the answers and for the memo."""
    workbench, memo = Workbench(), TrainingMemo(tmp_path)
    test = rows_of(tiny.make_texts(40, seed=9))
    configs = [
        config_of(tiny_encoder, tiny_data, **terms)
        for terms in ({}, {"lora": {"r": RANK, "alpha": 60}}, {"lora": {"r": 4}}, {"lora": None})
    ]
    slms = [workbench.slm(config.slm.models[0], ("a", "b"), config)[0] for config in configs]
    assert len({fingerprint(slm.state()) for slm in slms}) == 3
    assert fingerprint(slms[0].state()) == fingerprint(slms[1].state())
    for slm, config in zip(slms, configs, strict=True):
        memo(slm, ROWS, config, 1, 0, noise_source(0))
    kept = len(list(tmp_path.iterdir()))
    assert kept == 4
    again, _ = workbench.slm(configs[0].slm.models[0], ("a", "b"), configs[0])
    memo(again, ROWS, configs[0], 1, 0, noise_source(0))
    assert len(list(tmp_path.iterdir())) == kept
    assert differ(again.state(), slms[0].state()) == []
    # The same tensors under another scale.
    slms[1].load_state(slms[0].state())
    for slm in slms[:2]:
        expected = probabilities(slm, test.texts).argmax(1) == test.labels
        assert workbench.answers(slm, test).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("slm", "says"),
    [
        ({"lora": {}}, "slm.lora.r: "),
        ({"lora": {"r": 0}}, "slm.lora.r: .*greater than or equal to 1"),
        ({"lora": {"r": 8.0}}, "slm.lora.r: "),
        ({"lora": {"r": 8, "alpha": 0}}, "slm.lora.alpha: "),
        ({"lora": {"r": 8, "rank": 8}}, "slm.lora.rank: unknown field"),
        ({"lora": 8}, "slm.lora: "),
        ({"lora": {"r": 8}, "train_embeddings": True}, "slm: set lora or train_embeddings, not both"),
    ],
    ids=str,
)
def test_what_is_no_adapter_is_refused(slm: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^study\.toml: {says}") as caught:
        parse_config(
            {"federation": {"method": "fedavg"}, "data": {"train": "a.csv"}, "slm": slm}, "study.toml"
        )
    assert "\n" not in str(caught.value)


def test_a_model_takes_one_adapter(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    with pytest.raises(ModelError, match="takes one"):
        slm.adapt(Lora(r=2), 0)
    open_table = load_slm(str(tiny_encoder), LABELS, max_length=16, train_embeddings=True, seed=0)
    with pytest.raises(ModelError, match="frozen embedding layer"):
        open_table.adapt(Lora(r=2), 0)


def test_a_run_over_adapters(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = config_of(tiny_encoder, tiny_data)
    result = run(config, tmp_path / "run")
    whole = run(config_of(tiny_encoder, tiny_data, lora=None), tmp_path / "whole")
    sent = [max(row.bytes for row in one.clients[0].releases) for one in (result, whole)]
    assert sent[0] < 0.6 * sent[1]
    saved = tmp_path / "run/models/silo-1"
    test = load_corpus(config).test
    right = probabilities(load_trained(saved), test.texts).argmax(1) == test.labels
    assert float(right.mean()) == pytest.approx(result.clients[0].test_accuracy)
    with safe_open(saved / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "lora" in name]  # noqa: SIM118
    assert f"LoRA adapter of rank {RANK}" in (saved / "README.md").read_text()
    assert "LoRA" not in (tmp_path / "whole/models/silo-1/README.md").read_text()


def test_an_interrupted_run_over_adapters_goes_on(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_encoder, tiny_data)

    def stop(_: float, what: str) -> None:
        if "round 2, train: silo-2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", progress=stop)
    # Alone: 2 rounds of 3 silos, the first of which serves again; then round 2 of two silos.
    assert len(list((tmp_path / "run.partial/state").glob("*.safetensors"))) == 8
    whole = run(config, tmp_path / "whole")
    assert numbers(run(config, tmp_path / "run", resume=True)) == numbers(whole)


def test_the_centroids_of_a_run_over_adapters_are_audited(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The auditor finds the encoder of a release by its fingerprint and gets the silos' vectors from it."""
    sealed = {"models": "sealed"}
    terms = {"lora": {"r": RANK, "alpha": 24}}
    config = tiny_config(
        tiny_encoder, tiny_data, federation={"method": "fedkc"}, slm=terms, protection=sealed
    )
    run(config, tmp_path / "run")
    audited = Run(tmp_path / "run")
    recorded = next(one for one in audited.releases if one.row.kind == PayloadKind.CENTROIDS)
    release = open_recorded(recorded)
    slm = audited.encoder(recorded, release)
    assert fingerprint(slm.state()) == release.info["encoder"]
    rows = audited.rows(recorded.silo)
    groups = audited.clusters(recorded, len(release.tensors["centroids"]))
    vectors = embed(slm, rows.texts, "pooled")
    for centroid, group in zip(release.tensors["centroids"], groups, strict=True):
        np.testing.assert_allclose(vectors[group].mean(0), centroid, atol=1e-5)


def test_minilm_sends_a_thirtieth(minilm: str) -> None:
    """Rank 8 on MiniLM: 6 layers of 4 matrices 384 x 384 and 2 of 384 x 1536, and the head of 5 labels."""
    labels = ("a", "b", "c", "d", "e")
    size = {}
    for lora in (None, Lora(r=8)):
        slm = load_slm(minilm, labels, max_length=32, train_embeddings=False, seed=0, lora=lora)
        size[lora] = len(encode(PayloadKind.MODEL, {}, slm.state()))
    values = 6 * (4 * 8 * (384 + 384) + 2 * 8 * (384 + 1536)) + 5 * 384 + 5
    assert 4 * values < size[Lora(r=8)] < 4 * values + 2**15
    assert size[Lora(r=8)] < size[None] / 30
