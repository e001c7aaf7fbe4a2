"""The configuration: strict types, bounds, and files that are no configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from securefl.config import Config, load_config, parse_config
from securefl.errors import ConfigError
from securefl.privacy_terms import ModelPrivacy


def parse(section: str = "federation", **fields: Any) -> Config:
    document: dict[str, Any] = {
        "federation": {"method": "fedkc"},
        "data": {"train": "a.csv", "test": "b.csv"},
    }
    document[section] = {**document.get(section, {}), **fields}
    return parse_config(document, "study.toml")


NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize(
    ("section", "field", "values"),
    [
        ("federation", "rounds", ("2", True, 2.0, 0, 10**30)),
        ("federation", "seed", (True, -1, 2**31)),
        ("federation", "method", (1, True)),
        ("data", "train", (1, ["a.csv"])),
        ("data", "validation", (*NOT_FINITE, "0.2", True)),
        ("data", "train_rows", (10**30, 4.0)),
        ("slm", "models", ("one", [1], [], {"a": "b"})),
        ("slm", "train_embeddings", (1, "true", 0.0)),
        ("slm", "lora", (8, "r8", {}, {"r": 0}, {"r": 8.0}, {"r": True}, {"r": 513}, {"r": 8, "rank": 8})),
        ("slm", "lora", ({"r": 8, "alpha": 0}, {"r": 8, "alpha": 1.5}, {"r": 8, "dropout": 0.1})),
        ("federation", "mu", (*NOT_FINITE, -0.1, 1.1e4, True, "0.01")),
        ("slm", "learning_rate", (*NOT_FINITE, 0, 1.5, True, "1e-3")),
        ("fedkc", "alpha", (*NOT_FINITE, -1, 1.1e4)),
        ("fedkc", "compose", (True, 2.0)),
        ("crosslm", "top_p", (*NOT_FINITE, 0.009, 1e-300)),
        ("crosslm", "keep", (*NOT_FINITE, 1e-300)),
        ("crosslm", "gammas", ([1.0, 1.0], [1.0, 1.0, float("inf")], [1.0, 1.0, -1.0], [1.0, 1.0, True])),
        ("crosslm", "prompts", ({"a": 1},)),
        ("crosslm", "prompt", ("no slot", "{label} and {label}", "{other}", "{label} {x}", "{label", 1)),
        ("crosslm", "reading", ("no slot", "{label} is it", "  {label}.", "")),
        ("crosslm", "kl_ceiling", (*NOT_FINITE, 0.0, 101)),
        ("crosslm", "top_k", (0, -1, 1.5)),
        ("policy", "max_epsilon", (*NOT_FINITE, 0.0009, 1001)),
    ],
)
def test_values_that_would_fail_later_are_refused_here(
    section: str, field: str, values: tuple[object, ...]
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^study\.toml: {section}\.{field}") as caught:
            parse(section, **{field: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("epsilon", (*NOT_FINITE, 0.0, 0.0009, 1000.1, True)),
        ("noise_multiplier", (*NOT_FINITE, 0.009, 1.1e4)),
        ("clip", (*NOT_FINITE, 1e-7, 1.1e6)),
        ("delta", (*NOT_FINITE, 1e-13, 1.0)),
        ("min_size", (0, 4.0, 10**30)),
    ],
)
def test_privacy_outside_its_bounds(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"privacy\.centroids\.{field}: "):
            parse("privacy", centroids={field: value})


def test_the_bounds_themselves_are_allowed_and_an_integer_is_a_float() -> None:
    for field, low, high in (
        ("epsilon", 0.001, 1000),
        ("noise_multiplier", 0.01, 10**4),
        ("clip", 1e-6, 10**6),
        ("delta", 1e-12, 0.099),
    ):
        for value in (low, high):
            found = getattr(parse("privacy", centroids={field: value}).privacy.centroids, field)
            assert (type(found), found) == (float, value)
    assert parse("crosslm", gammas=[1, 0, 0.5]).crosslm.gammas == (1.0, 0.0, 0.5)
    assert parse("slm", models=["a"]).slm.models == ("a",)


def test_the_reason_for_the_bounds_of_epsilon_is_given() -> None:
    with pytest.raises(ConfigError, match=r"epsilon: is not between 0\.001 and 1000: .*noise.*claim"):
        parse("privacy", centroids={"epsilon": 1e5})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a=" + b"[" * 50_000, "too deep"),
        (b"a=" + b"{a=" * 50_000, "too deep"),
        (b"[federation]\nrounds=" + b"9" * 5000, "digits"),
        (b"a" + b".a" * 2000 + b"=1", "study.toml"),
        (b"x" * (2**20 + 1), "larger"),
        (b"\xff", "UTF-8"),
        (b"rounds", "not valid TOML"),
        (b"rounds = 1979-05-27", "federation"),
    ],
    ids=["lists", "tables", "digits", "dotted", "large", "bytes", "no TOML", "date"],
)
def test_a_file_that_is_no_configuration(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert len(message) < 500
    assert "\n" not in message


def test_noise_on_models_needs_a_masked_sum() -> None:
    noise = {"clip": 1.0, "epsilon": 8.0}
    assert parse("privacy", models=noise).privacy.models == ModelPrivacy(clip=1.0, epsilon=8.0)
    for section, changes in (
        ("protection", {"models": "sealed"}),
        ("protection", {"models": "ckks"}),
        ("federation", {"method": "crosslm"}),
    ):
        document: dict[str, Any] = {
            "federation": {"method": "fedavg"},
            "data": {"train": "a.csv", "test": "b.csv"},
            "privacy": {"models": noise},
        }
        document.setdefault(section, {}).update(changes)
        with pytest.raises(ConfigError, match=r"study\.toml: privacy\.models: "):
            parse_config(document, "study.toml")
    for wrong in (
        {"clip": 1.0},
        {**noise, "noise_multiplier": 1.0},
        {"epsilon": 8.0},
        {**noise, "delta": 1.0},
    ):
        with pytest.raises(ConfigError, match=r"study\.toml: privacy\.models"):
            parse("privacy", models=wrong)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "no.toml", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)


def test_paper_mode_has_nothing_that_is_not_in_the_paper() -> None:
    extra = {"graders": "ensemble", "prior": "estimated", "targets": "graders"}
    for key, value in {**extra, "baseline": True, "regenerate": True}.items():
        with pytest.raises(ConfigError, match=rf"crosslm: {key} is not in the paper"):
            parse("crosslm", mode="paper", **{key: value})
    plain = parse("crosslm", mode="paper").crosslm.ingredients
    assert (plain.graders, plain.prior, plain.targets) == ("own", "none", "labels")
    assert not plain.baseline
    assert not plain.regenerate
    assert plain.diversity
    assert plain.label_smoothing == 0.0
    stable = parse("crosslm", prior="none").crosslm.ingredients
    assert (stable.graders, stable.prior, stable.label_smoothing) == ("ensemble", "none", 0.1)
