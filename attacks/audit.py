"""Runs the attacks over a run's folder and judges what they found: RUN_DIR -> Audit.

What an attack may see is what the adversary sees; the truth is read only to score it, to choose control rows
with the members' labels, and to check that a release is what the run says. Nothing of a text leaves this
room: recovered tokens are counted, never written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attacks import membership, tokens
from attacks.audit_note import audit_note
from attacks.audit_report import write_audit_report
from attacks.bounds import proposition_1
from attacks.figures import (
    MEMBERSHIP_RATIO,
    MIN_TRIALS,
    TOKEN_RECOVERY,
    membership_figures,
    token_figures,
)
from attacks.findings import Audit, AuditedRelease
from attacks.judgement import Book, attacks_left, judge
from attacks.runs import CENTROIDS, Recorded, Run, Texts, open_recorded
from attacks.signature import SIGNATURE
from securefl.errors import ProtocolError, UsageError
from securefl.files import write_atomic
from securefl.local import public_seeds
from securefl.models import Slm
from securefl.release import GaussianSums, NonPrivate, PayloadKind, Release, canonical_json
from securefl.training import embed, probabilities

Progress = Callable[[float, str], None]
# Auxiliary rows below which no covariance is worth estimating.
MIN_AUXILIARY = 16
_CONTROLS_PER_MEMBER = 2


@dataclass(frozen=True, repr=False)
class _Scene:
    """One centroid release with everything that its attacks need.

    auxiliary and controls are disjoint parts of the pool. groups: indices into `rows` behind each centroid.
    """

    recorded: Recorded
    release: Release
    slm: Slm
    rows: Texts
    groups: list[list[int]]
    auxiliary: Texts
    controls: Texts
    rng: np.random.Generator

    @property
    def members(self) -> list[int]:
        return [row for group in self.groups for row in group]


def split_pool(pool: Texts, seed: int) -> tuple[Texts, Texts]:
    """Two halves of the pool with the same labels: auxiliary text of the adversary, and control rows."""
    order = np.random.default_rng([seed, 1]).permutation(len(pool))
    ranked = sorted(order.tolist(), key=lambda row: pool.labels[row])
    return pool.take(ranked[::2]), pool.take(ranked[1::2])


def audit(run_dir: Path | str, out: Path | str | None = None, progress: Progress | None = None) -> Audit:
    """Attack every recorded centroid release of a run. Deterministic in the run's seed.

    out: a folder for the files that `audit_files` names, each written whole or not at all; None writes
    nothing.
    progress: called with the share done and what is being done.
    Raises UsageError for a folder that is no run, ProtocolError for a release that was changed or names an
    encoder that cannot be found, SecureflError for vectors that no attack could tell apart.
    """
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise UsageError(f"{out}: is a file; name a folder for the audit")
    run = Run(Path(run_dir))
    book, inventory, scenes = Book(), [], []
    views = _Views()
    say: Progress = progress or (lambda _share, _what: None)
    recorded = run.releases
    for one in recorded:
        release = open_recorded(one) if one.row.kind in CENTROIDS else None
        inventory.append(_inventory(run, one, release))
    # By round, since all silos of a round have the same encoder.
    targets = sorted(
        (one for one in recorded if one.row.kind in CENTROIDS), key=lambda one: (one.row.round, one.silo)
    )
    for index, one in enumerate(targets):
        say(0.5 * index / len(targets), f"{one.silo}, round {one.row.round}: {one.row.kind}")
        scene = _set(run, one, index, book)
        if scene is not None and scene.release.kind is PayloadKind.CENTROIDS:
            _membership(scene, run, book, views)
        elif scene is not None:
            scenes.append(_prepare_tokens(scene, book))
    _recover([scene for scene in scenes if scene is not None], run, book, say)
    attacks_left(run, recorded, book)
    result = judge(run, inventory, book)
    say(1.0, "done")
    if out is not None:
        _write(result, Path(run_dir), Path(out))
    return result


def audit_files(run_dir: Path, out: Path) -> tuple[str, str, str]:
    """The files of an audit in `out`: findings, report and note.

    A run's own folder has a report.html already, which is kept.
    """
    own = Path(out).resolve() == Path(run_dir).resolve()
    return "audit.json", "audit.html" if own else "report.html", "audit.md"


def _write(result: Audit, run_dir: Path, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be made ({os.strerror(error.errno or 0)})") from error
    findings, report, note = audit_files(run_dir, out)
    # A signature that is there is of other files than these.
    (out / SIGNATURE).unlink(missing_ok=True)
    write_atomic(out / findings, (result.to_json() + "\n").encode())
    write_audit_report(result, out / report)
    write_atomic(out / note, audit_note(result).encode())


def _inventory(run: Run, one: Recorded, release: Release | None) -> AuditedRelease:
    sizes = [] if release is None else [float(size) for size in release.tensors.get("sizes", ())]
    return AuditedRelease(
        silo=one.silo,
        round=one.row.round,
        kind=one.row.kind,
        file=str(one.path.relative_to(run.path)),
        sha256=one.sha256,
        readable_by=one.row.readable_by,
        encoder="" if release is None else str(release.info.get("encoder", "")),
        rows_per_centroid=sizes,
        claim=one.row.claim,
    )


def _set(run: Run, one: Recorded, index: int, book: Book) -> _Scene | None:
    """What the attacks on one centroid release need; None, with the reason noted, where it is too little."""
    release = open_recorded(one)
    if not isinstance(release.claim, NonPrivate | GaussianSums):
        raise ProtocolError(f"{one.path}: {release.claim.mechanism} is no mechanism that releases centroids")
    attack = MEMBERSHIP_RATIO if release.kind is PayloadKind.CENTROIDS else TOKEN_RECOVERY
    count = _check_arrays(one, release)
    if not count:
        book.skip(attack, one, "every cluster was withheld, so there is no centroid to attack")
        return None
    auxiliary, controls = split_pool(run.pool, run.result.seed)
    if len(auxiliary) < MIN_AUXILIARY:
        why = f"{len(auxiliary)} auxiliary rows in truth/pool.jsonl, at least {MIN_AUXILIARY} are needed"
        book.skip(attack, one, why)
        return None
    rng = np.random.default_rng([run.result.seed, 2, index])
    slm, rows = run.encoder(one, release), run.rows(one.silo)
    return _Scene(one, release, slm, rows, run.clusters(one, count), auxiliary, controls, rng)


def _check_arrays(one: Recorded, release: Release) -> int:
    """The number of centroids, once their arrays are those of such a release: shapes, and finite numbers."""
    layered = release.kind is PayloadKind.EMBEDDING_CENTROIDS
    axes = {"centroids": 3 if layered else 2, "sizes": 1, "predictions": 2}
    if layered:
        axes["mask"] = 2
    if not set(axes) <= set(release.tensors):
        raise ProtocolError(f"{one.path}: lacks {sorted(set(axes) - set(release.tensors))[0]}")
    arrays = {name: release.tensors[name] for name in axes}
    count = len(arrays["sizes"]) if arrays["sizes"].ndim == 1 else -1
    for name, array in arrays.items():
        if array.ndim != axes[name] or len(array) != count or not np.isfinite(array).all():
            raise ProtocolError(f"{one.path}: {name}: is not a finite array with one entry for each centroid")
    if layered and arrays["mask"].shape != arrays["centroids"].shape[:2]:
        raise ProtocolError(f"{one.path}: mask: does not fit the centroids")
    if (arrays["sizes"] <= 0).any():
        raise ProtocolError(f"{one.path}: sizes: a centroid of no rows cannot have been released")
    return count


class _Views:
    """Pooled vectors by text, kept as long as the encoder stays the same object."""

    def __init__(self) -> None:
        self._slm: Slm | None = None
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def pooled(self, slm: Slm, texts: Texts) -> NDArray[np.float64]:
        """(n, d) in the order of `texts`."""
        if slm is not self._slm:
            self._slm, self._vectors = slm, {}
        missing = [text for text in dict.fromkeys(texts.texts) if text not in self._vectors]
        self._vectors.update(zip(missing, embed(slm, missing, "pooled"), strict=True))
        return np.array([self._vectors[text] for text in texts.texts], np.float64)


def _check_truth(scene: _Scene, vectors: NDArray[Any], mask: NDArray[Any] | None) -> None:
    """Exact centroids must be the means of the rows that the truth names, under the encoder at hand."""
    centroids = scene.release.tensors["centroids"]
    if centroids.shape[1:] != vectors.shape[1:]:
        raise ProtocolError(f"{scene.recorded.path}: centroids: are not of the width of the encoder it names")
    if not isinstance(scene.release.claim, NonPrivate):
        return
    for index, (group, size) in enumerate(zip(scene.groups, scene.release.tensors["sizes"], strict=True)):
        if len(group) != size:
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index} states {size:g} rows, "
                f"the truth names {len(group)} for it"
            )
        if mask is None:
            mean = vectors[group].mean(0)
        else:
            there = np.maximum(mask[group].sum(0), 1)[:, None]
            mean = (vectors[group] * mask[group][..., None]).sum(0) / there
        if np.abs(centroids[index] - mean).max() > 1e-2 * np.abs(mean).max():
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index} is not the mean of the rows that the truth names "
                "for it under this encoder, so a score would mean nothing"
            )


def _label_ids(texts: Texts, names: Mapping[str, int]) -> NDArray[np.int64]:
    return np.array([names.get(label, -1) for label in texts.labels], np.int64)


# --- attack 1


def _membership(scene: _Scene, run: Run, book: Book, views: _Views) -> None:
    slm, release, rng = scene.slm, scene.release, scene.rng
    vectors = views.pooled(slm, scene.rows)
    _check_truth(scene, vectors, None)
    with torch.inference_mode():
        logits = slm.head(torch.from_numpy(vectors).float())
    _proposition(scene, vectors, logits.softmax(-1).numpy(), book)
    names = {label: index for index, label in enumerate(slm.labels)}
    members = scene.rows.take(scene.members)
    most = max(_CONTROLS_PER_MEMBER * len(members), 200)
    chosen = membership.match_labels(_label_ids(members, names), _label_ids(scene.controls, names), rng, most)
    for what, count in (("rows behind centroids", len(members)), ("control rows", len(chosen))):
        if count < MIN_TRIALS:
            why = f"{count} {what} with matching labels, at least {MIN_TRIALS} are needed"
            book.skip(MEMBERSHIP_RATIO, scene.recorded, why)
            return
    seeds = None
    if isinstance(release.claim, GaussianSums):
        seeds = np.asarray(public_seeds(slm, run.config.fedkc.clusters)[1], np.float64)
    target = membership.Target(
        np.asarray(release.tensors["centroids"], np.float64),
        np.asarray(release.tensors["sizes"], np.float64),
        release.claim,
        seeds,
    )
    scores = membership.attack(
        target,
        views.pooled(slm, scene.auxiliary),
        vectors[scene.members],
        views.pooled(slm, scene.controls.take(chosen.tolist())),
        rng,
    )
    if min(len(side) for side in scores.ratio) < MIN_TRIALS:
        inside, outside = (len(side) for side in scores.ratio)
        why = (
            f"{inside} members and {outside} controls fall to a centroid that was released, "
            f"fewer rows than the {MIN_TRIALS} of each that are needed"
        )
        book.skip(MEMBERSHIP_RATIO, scene.recorded, why)
        return
    book.figures += membership_figures(scene.recorded, target, scores, rng)


def _proposition(scene: _Scene, vectors: NDArray[Any], predictions: NDArray[Any], book: Book) -> None:
    if not scene.members:  # noise alone kept every centroid, so there is no scatter to measure
        return
    where = f"{scene.recorded.silo}, round {scene.recorded.row.round}"
    book.bounds.append(
        proposition_1(
            f"proposition 1, scatter within clusters <= total ({where})", vectors, predictions, scene.groups
        )
    )


# --- attack 2


@dataclass(frozen=True, repr=False)
class _TokenScene:
    """One embedding-layer release ready for attack 2; truth and others are for the scoring."""

    scene: _Scene
    target: tokens.Target
    truth: list[list[tokens.Ids]]
    others: list[list[tokens.Ids]]


def _prepare_tokens(scene: _Scene, book: Book) -> _TokenScene | None:
    slm, release = scene.slm, scene.release
    vectors, mask = embed(slm, scene.rows.texts, "embeddings")
    membership.check_vectors(vectors[mask > 0], "the embedding layer")
    _check_truth(scene, vectors, mask)
    _proposition(scene, vectors, probabilities(slm, scene.rows.texts), book)
    tensors = {name: np.asarray(release.tensors[name], np.float32) for name in ("centroids", "mask", "sizes")}
    target = tokens.Target(**tensors, claim=release.claim)
    positions = target.centroids.shape[1]
    own, strangers = (tokens.token_ids(slm, part.texts) for part in (scene.rows, scene.controls))
    truth = [tokens.by_position([own[row] for row in group], positions) for group in scene.groups]
    if sum(len(ids) for row in truth for ids in row) < MIN_TRIALS:
        book.skip(TOKEN_RECOVERY, scene.recorded, f"fewer than {MIN_TRIALS} tokens are behind the centroids")
        return None
    others = []
    for group in scene.groups:
        drawn = scene.rng.permutation(len(strangers))[: len(group)]
        others.append(tokens.by_position([strangers[row] for row in drawn], positions))
    return _TokenScene(scene, target, truth, others)


def _recover(ready: list[_TokenScene], run: Run, book: Book, say: Progress) -> None:
    """Attack 2 on all releases over one dictionary at once: they share its cost."""
    groups: dict[str, list[_TokenScene]] = {}
    for one in ready:
        info = one.scene.release.info
        table = info["encoder"] if run.config.slm.train_embeddings else info["base_sha256"]
        noise = one.target.claim.model_dump(mode="json", exclude={"reason"})
        key = canonical_json([table, noise, list(one.target.centroids.shape[1:])]).decode()
        groups.setdefault(key, []).append(one)
    for number, group in enumerate(groups.values()):
        slm, auxiliary = group[0].scene.slm, group[0].scene.auxiliary
        parts = [one.target for one in group]
        together = tokens.Target(
            np.concatenate([part.centroids for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            parts[0].claim,
        )
        positions = together.centroids.shape[1]
        known = tokens.token_ids(slm, auxiliary.texts)
        prior = tokens.fit_prior(known, positions, tokens.vocabulary_size(slm))

        def tell(share: float, number: int = number, all_: int = len(groups)) -> None:
            say(0.5 + 0.5 * (number + share) / all_, "reading tokens back")

        recovered = tokens.recover(slm, together, prior, auxiliary.texts, tell)
        start = 0
        for one in group:
            part = recovered.part(start, start + len(one.truth))
            start += len(one.truth)
            book.figures += token_figures(
                one.scene.recorded, one.target, prior, part, one.truth, one.others,
                tokens.special_ids(slm), one.scene.rng,
            )  # fmt: skip
