"""Attack 2 as it is put to a run: every embedding-layer centroid release, all over one dictionary at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attacks import (
    assembly,
    dictionary,
    layer_tokens,
    membership,
    moved_table,
    token_rounds,
    token_scores,
    tokens,
)
from attacks.adversary import TOKENS, NotEnough
from attacks.attack import Attack, Progress, lacks
from attacks.bench import token_settings, token_weights
from attacks.bench.membership import measure_proposition
from attacks.bench.token_figures import FEW, NAME, TokenScene, text_figures, token_figures
from attacks.evidence import Evidence, Scene, check_truth
from attacks.figures import MIN_TRIALS
from attacks.judgement import Book
from securefl.data_terms import PAIR
from securefl.errors import ModelError, ProtocolError
from securefl.models import load_llm
from securefl.release import NonPrivate, PayloadKind, canonical_json
from securefl.slm import Slm
from securefl.training import embed, probabilities

_LANGUAGE_MODEL = "builtin:smollm2"
_LEARNT_FROM = 1024  # texts: of 64 positions and 384 numbers they are 100 MB


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    # One part: the releases share a dictionary and its cost.
    book.part("2", lambda page: _attack(evidence, page, say))


def _attack(evidence: Evidence, book: Book, say: Progress) -> None:
    if not evidence.source.truth:
        for recorded in evidence.targets:
            try:
                token_settings.blind(evidence.blind(recorded), book)
            except NotEnough as why:
                book.skip(token_settings.BLIND, recorded, str(why))
        return
    ready = []
    for recorded, scene in evidence.scenes(PayloadKind.EMBEDDING_CENTROIDS):
        try:
            if isinstance(scene, NotEnough):
                raise scene
            ready.append(_prepare(scene, book))
        except NotEnough as why:
            book.skip(NAME, recorded, str(why))
    _recover([one for one in ready if not one.scene.layer], book, say)
    for one in ready:
        if one.scene.layer:
            say(1, f"{one.scene.where}: reading tokens back from layer {one.scene.layer}")
            _read_layer(one, book)


def _read_layer(one: TokenScene, book: Book) -> None:
    """Attack 2 where a token's vector depends on its whole text, so that no dictionary holds it."""
    scene, slm = one.scene, one.scene.slm
    try:
        some = scene.some_auxiliary(_LEARNT_FROM).texts
        vectors, mask = embed(slm, some, scene.layer)
        positions = one.target.centroids.shape[1]
        known = [ids[:positions] for ids in dictionary.token_ids(slm, some)]
        prior = dictionary.fit_prior(known, positions, dictionary.vocabulary_size(slm))
        learnt = layer_tokens.learn(slm, some, vectors[:, :positions], mask[:, :positions])
        read = layer_tokens.recover_layer(slm, one.target, prior, some, learnt)
    except NotEnough as why:
        book.skip(NAME, scene.recorded, str(why))
        return
    special = dictionary.special_ids(slm)
    figures = token_figures(
        scene.recorded, one.target, prior, read, one.truth, one.others, special, one.rng, layer=scene.layer
    )
    whole, texts = text_figures(one, read, assembly.NGrams(known, dictionary.vocabulary_size(slm)), None)
    if not whole:
        figures = [replace(f, texts=texts) if f.metric == "token_f1" else f for f in figures]
    book.figures += [*figures, *whole]


def _prepare(scene: Scene, book: Book) -> TokenScene:
    slm, release = scene.slm, scene.release
    if any(PAIR in text for text in scene.rows.texts[:1]) and "token_type_ids" in slm.tokenize(["x"]):
        raise NotEnough(
            "the second text of a pair has a token type of its own under this encoder, and the dictionary is "
            "of first texts"
        )
    vectors, mask = embed(slm, scene.rows.texts, scene.layer)
    membership.check_vectors(vectors[mask > 0], f"encoder layer {scene.layer}")
    exact = _exact(scene, vectors, mask)
    measure_proposition(scene, vectors, probabilities(slm, scene.rows.texts), book)
    centroids, there, sizes = (
        np.asarray(release.tensors[name], np.float32) for name in ("centroids", "mask", "sizes")
    )
    target = tokens.Target(centroids, there, sizes, release.claim)
    positions = target.centroids.shape[1]
    own, known = (
        [ids[:positions] for ids in dictionary.token_ids(slm, part.texts)]
        for part in (scene.rows, scene.controls)
    )
    texts = [[own[row] for row in group] for group in scene.groups]
    truth = [token_scores.by_position(group, positions) for group in texts]
    if sum(len(ids) for row in truth for ids in row) < MIN_TRIALS:
        raise NotEnough(f"fewer than {MIN_TRIALS} tokens are behind the centroids")
    rng = scene.rng(2)
    strangers = [[known[row] for row in rng.permutation(len(known))[: len(group)]] for group in scene.groups]
    others = [token_scores.by_position(group, positions) for group in strangers]
    off = 0.0
    if not exact:
        off = float(moved_table.distances(slm, target, truth, others).max())
        if off > moved_table.NEAR:
            check_truth(scene, vectors, mask)
    return TokenScene(scene, rng, target, truth, others, texts, strangers, off=off)


def _exact(scene: Scene, vectors: NDArray[np.float32], mask: NDArray[np.float32]) -> bool:
    """Whether the release is what the truth says, under this encoder.

    False where the table of another one, trained from this one's, may have made it, as an institution's may.
    Raises ProtocolError where it cannot.
    """
    if token_weights.of_rows(scene):
        token_weights.check_weighted(scene, vectors, mask)
        return True
    tensors, claim = scene.release.tensors, scene.release.claim
    try:
        check_truth(scene, vectors, mask)
    except ProtocolError:
        same = tensors["centroids"].shape[1:] == vectors.shape[1:]
        same &= [len(group) for group in scene.groups] == tensors["sizes"].tolist()
        moved = scene.evidence.run is None and isinstance(claim, NonPrivate) and not scene.layer
        if moved and same:
            return False
        raise
    return True


def _averages(ready: list[TokenScene]) -> list[TokenScene]:
    """Noised releases of the same rows in several rounds, averaged; exact ones say the same every time."""
    same: dict[str, list[TokenScene]] = {}
    for one in ready:
        if one.target.private:
            key = canonical_json([one.scene.recorded.silo, [sorted(group) for group in one.scene.groups]])
            same.setdefault(key.decode(), []).append(one)
    return [
        replace(parts[-1], target=token_rounds.average([one.target for one in parts]), rounds=len(parts))
        for parts in same.values()
        if len(parts) > 1
    ]


def _moves(one: TokenScene) -> bool:
    config = one.scene.evidence.source.config
    return config is not None and config.slm.train_embeddings


def _language_model(slm: Slm) -> assembly.Scorer | None:
    """For a few texts better than counts of other text; None where it is not installed."""
    try:
        model, tokenizer = load_llm(_LANGUAGE_MODEL)
    except ModelError:
        return None
    return assembly.CausalScorer(model, tokenizer, slm.tokenizer.decode, dictionary.special_ids(slm))


def _recover(ready: list[TokenScene], book: Book, say: Progress) -> None:
    """Attack 2 on all releases over one dictionary at once: they share its cost."""
    groups: dict[str, list[TokenScene]] = {}
    # Less is known of a silo's other releases too, and these would say the same again.
    last = {one.scene.recorded.silo: one.scene.recorded.row.round for one in ready}
    # A language model takes its time, so it reads the smallest clusters of one release.
    modelled = next((one for one in ready if any(len(texts) in FEW for texts in one.texts)), None)
    for one in ready:
        info = one.scene.release.info
        table = info["encoder"] if _moves(one) else info["base_sha256"]
        noise = one.target.claim.model_dump(mode="json", exclude={"reason"})
        key = canonical_json([table, noise, list(one.target.centroids.shape[1:])]).decode()
        groups.setdefault(key, []).append(one)
    for key, group in list(groups.items()):
        for one in _averages(group):
            groups.setdefault(f"{one.rounds} rounds of {key}", []).append(one)
    for number, group in enumerate(groups.values()):
        slm, auxiliary = group[0].scene.slm, group[0].scene.auxiliary
        parts = [one.target for one in group]
        together = tokens.Target(
            np.concatenate([part.centroids for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            parts[0].claim,
            parts[0].rounds,
        )
        positions = together.centroids.shape[1]
        known = dictionary.token_ids(slm, auxiliary.texts)
        vocabulary = dictionary.vocabulary_size(slm)
        prior = dictionary.fit_prior(known, positions, vocabulary)
        score = assembly.NGrams([ids[:positions] for ids in known], vocabulary)
        model = _language_model(slm) if any(one is modelled for one in group) else None

        def tell(share: float, number: int = number, all_: int = len(groups)) -> None:
            say((number + share) / all_, "reading tokens back")

        recovered = tokens.recover(slm, together, prior, auxiliary.texts, tell)
        silos = [one for one in group if one.scene.recorded.row.round == max(last.values())]
        if not any(one.target.private or one.off for one in silos):
            book.figures += token_weights.averaged(silos, prior, auxiliary.texts)
        start = 0
        for one in group:
            part = recovered.part(start, start + len(one.truth))
            start += len(one.truth)
            special = dictionary.special_ids(slm)
            attack, adversary = NAME, TOKENS
            details: dict[str, float] = {}
            if token_weights.of_rows(one.scene):
                try:
                    book.figures += token_weights.by_weight(one, part, prior, auxiliary.texts)
                except NotEnough as why:
                    book.skip(token_weights.WEIGHTS, one.scene.recorded, str(why))
                continue
            if one.off:
                attack, adversary = token_settings.TABLE, token_settings.PUBLIC
                book.figures += token_settings.as_it_is(one, part, prior)
                try:
                    found = moved_table.recover_moved(slm, one.target, prior, auxiliary.texts)
                except NotEnough as why:
                    book.skip(attack, one.scene.recorded, str(why))
                    continue
                part, details = found.recovered, token_settings.moved_by(one, found)
            figures = token_figures(
                one.scene.recorded, one.target, prior, part, one.truth, one.others, special, one.rng,
                one.rounds, attack=attack, adversary=adversary, told=details,
            )  # fmt: skip
            whole, texts = text_figures(one, part, score, model if one is modelled else None)
            if not whole:  # too few texts for a figure of their own
                figures = [replace(f, texts=texts) if f.metric == "token_f1" else f for f in figures]
            book.figures += [*figures, *whole]
            # Sizes are found by what adds up to the last digit, which a table that moved does not.
            if one.scene.recorded.row.round == last[one.scene.recorded.silo] and not one.off:
                book.figures += token_settings.sizes_withheld(one, prior, auxiliary.texts)
            if _moves(one) and one.rounds == 1:
                try:
                    book.figures += token_settings.public_table(one, prior, auxiliary.texts)
                except NotEnough as why:
                    book.skip(token_settings.TABLE, one.scene.recorded, str(why))


ATTACK = Attack(2, NAME, TOKENS, lacks(PayloadKind.EMBEDDING_CENTROIDS, "embedding-layer centroid"), _run)
