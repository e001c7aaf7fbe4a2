"""A silo's centroids from its texts: what un-noised ones withhold, and what their claim says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securefl.data import Rows
from securefl.local import CentroidJob, release_centroids
from securefl.messages import FedKcTerms
from securefl.models import load_slm
from securefl.privacy import noise_source
from securefl.privacy_terms import CentroidPrivacy
from securefl.release import NonPrivate

TEXTS = ("a film",) * 5 + ("the goal of the team",) * 4
PATIENTS = ("p",) * 5 + ("p", "q", "r", "s")


@pytest.mark.parametrize(
    ("units", "min_size", "sizes"),
    [((), 3, [4, 5]), ((), 5, [5]), (PATIENTS, 3, [4]), (PATIENTS, 1, [4, 5]), (PATIENTS, 5, [])],
)
def test_a_minimum_size_counts_units(
    units: tuple[str, ...], min_size: int, sizes: list[int], tiny_encoder: Path
) -> None:
    """Five rows of one patient are one patient; the sizes that are told are the rows behind an exact mean."""
    slm = load_slm(str(tiny_encoder), ("a", "b"), max_length=8, train_embeddings=False, seed=0)
    rows = Rows(tuple(f"row {i}" for i in range(9)), TEXTS, np.zeros(9, np.int64), units)
    terms = FedKcTerms(
        compose="embeddings", source="peers", clusters=2, alpha=0.5, weights="uniform", per_step=None
    )
    unit = "patient_id" if units else "row"
    job = CentroidJob(terms, CentroidPrivacy(min_size=min_size), 1, 0, noise_source(0), unit, "add-remove")
    release, behind = release_centroids(slm, rows, job, {})
    assert sorted(release.tensors["sizes"].tolist()) == sizes
    assert sorted(map(len, behind)) == sizes
    for ids in behind:
        assert {TEXTS[int(one.removeprefix("row "))] for one in ids} <= {TEXTS[0]} or len(ids) == 4
    assert isinstance(release.claim, NonPrivate)
    whose = "values of patient_id" if units else "rows"
    assert f"at least {min_size} {whose} in each is not differential privacy" in release.claim.reason
    assert release.info == {"size_unit": "row"}
