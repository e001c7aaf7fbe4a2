"""Peers that share what no rows give: named and left out, and the others are learned from all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securefl import local, steps
from securefl.config import PERMIT_EMBEDDINGS
from securefl.data import Rows
from securefl.local import CentroidJob
from securefl.messages import Dropped
from securefl.release import Release
from securefl.slm import Slm
from tests.federation import Parties, make_parties, tiny_config

Spoil = Callable[[Release], Release]


def changed(name: str, change: Callable[[Any], Any]) -> Spoil:
    """A release with one of its arrays changed."""
    return lambda release: replace(
        release, tensors={**release.tensors, name: np.asarray(change(release.tensors[name]), np.float32)}
    )


def shared(parties: Parties, spoil: Mapping[int, Spoil], monkeypatch: pytest.MonkeyPatch) -> list[Dropped]:
    """Play a run in which silo-2 spoils what it shares in some rounds; what silo-1 ignored of it."""
    theirs = parties.clients["silo-2"].data.train.ids

    def release_centroids(
        slm: Slm, rows: Rows, job: CentroidJob, info: Mapping[str, Any]
    ) -> tuple[Release, list[list[str]]]:
        release, clusters = local.release_centroids(slm, rows, job, info)
        if rows.ids == theirs and info["round"] in spoil:
            release = spoil[info["round"]](release)
        return release, clusters

    monkeypatch.setattr(steps, "release_centroids", release_centroids)
    parties.play(lambda server: server.finished)
    assert not any(one.name != "silo-2" for one in parties.clients["silo-1"].ignored)
    return list(parties.clients["silo-1"].ignored)


NOISED = {"centroids": {"noise_multiplier": 0.5, "min_size": 2}}
CASES: dict[str, tuple[Spoil, str, dict[str, Any]]] = {
    "too long": (changed("centroids", lambda x: 100 * x), "long, and rows make none longer than", {}),
    "one too long": (
        changed("centroids", lambda x: x * np.array([1000] + [1] * (len(x) - 1))[:, None]),
        "centroid 1 of silo-2",
        {},
    ),
    "predictions off the simplex": (changed("predictions", lambda x: 2 * x), "are not probabilities", {}),
    "a negative prediction": (
        changed("predictions", lambda x: np.column_stack([x[:, 0] + x[:, 1] + 1, 0 * x[:, 1] - 1])),
        "are not probabilities",
        {},
    ),
    "another width": (changed("centroids", lambda x: x[:, :-1]), "centroids", {}),
    "too long under noise": (
        changed("centroids", lambda x: 1000 * x),
        "long, and rows make none longer than",
        {"privacy": NOISED},
    ),
    "a clip of its own": (
        lambda release: replace(release, claim=release.claim.model_copy(update={"clip": 1e4})),
        "claims a clip of 1e+04",
        {"privacy": NOISED},
    ),
    "too long at a layer": (
        changed("centroids", lambda x: 100 * x),
        "long, and rows make none longer than",
        {"fedkc": {"compose": 1}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_rows_give_is_ignored_and_named(
    case: str, tiny_encoder: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, says, changes = CASES[case]
    config = tiny_config(tiny_encoder, tiny_data, federation={"method": "fedkc"}, **changes)
    policy = {"allow_embedding_centroids": PERMIT_EMBEDDINGS} if "fedkc" in changes else {}
    parties = make_parties(config, tmp_path, **policy)
    (ignored,) = shared(parties, {2: spoil}, monkeypatch)
    assert ignored.name == "silo-2"
    assert ignored.step == "share"
    assert says in ignored.reason


@pytest.mark.parametrize("changes", [{}, {"privacy": NOISED}, {"fedkc": {"clusters": 1}}])
def test_nothing_honest_is_ignored(
    changes: dict[str, Any],
    tiny_encoder: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(tiny_encoder, tiny_data, federation={"method": "fedkc", "rounds": 4}, **changes)
    assert shared(make_parties(config, tmp_path), {}, monkeypatch) == []


def test_the_same_centroids_in_every_round_are_noticed(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_encoder, tiny_data, federation={"method": "fedkc", "rounds": 4})
    first: list[Release] = []

    def again(release: Release) -> Release:
        first.append(release)
        return replace(first[0], info=release.info)

    ignored = shared(make_parties(config, tmp_path), {2: again, 3: again, 4: again}, monkeypatch)
    assert [one.reason for one in ignored] == [
        "silo-2 sent the same centroids as in round 2",
        "silo-2 sent the same centroids as in round 2",
    ]
