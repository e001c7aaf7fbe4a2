"""The propositions that FedKC rests its claim of privacy on, each checked on what was really released.

None of them says that a text cannot be read; what they say, and where they say nothing, stands at each.
Arrays and functions of tensors only; no files, models or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.adversary import NotEnough
from attacks.findings import Bound
from attacks.membership import check_vectors
from securefl.errors import SecureflError

LEAST_TEXTS = 8
_SETTLED = 1e-4
_SLACK = 1e-6


def proposition_1(
    name: str, vectors: NDArray[Any], predictions: NDArray[Any], groups: list[list[int]]
) -> Bound:
    """Proposition 1 of FedKC, measured: scatter within clusters is at most the scatter around one mean.

    vectors: (n, ...) and predictions: (n, C) of the rows; groups: row indices of each cluster. `bound` is the
    total scatter over the grouped rows, `measured` the one within clusters. It holds for every partition, so
    it never tells a good clustering from a random one; with one cluster both are equal and it says nothing.
    """
    joined = np.concatenate(
        [
            np.asarray(vectors, np.float64).reshape(len(vectors), -1),
            np.asarray(predictions, np.float64).reshape(len(predictions), -1),
        ],
        axis=1,
    )
    used = joined[[row for group in groups for row in group]]
    total = float(((used - used.mean(0)) ** 2).sum())
    within = sum(
        float(((joined[group] - joined[group].mean(0)) ** 2).sum()) for group in groups if len(group)
    )
    slack = _SLACK * max(total, 1e-30)
    return Bound(
        name=name,
        bound=total,
        measured=within,
        holds=within <= total + slack,
        vacuous=sum(bool(group) for group in groups) < 2 or within >= total - slack,
    )


def proposition_2(name: str, matrices: NDArray[Any], pooled: NDArray[Any], rng: np.random.Generator) -> Bound:
    """Proposition 2, measured: is the distance of embedding-layer outputs bounded by that of pooled vectors?

    matrices: (n, S, e), zeros past a text's end; pooled: (n, d). A map to fewer numbers has no such constant,
    so one is *assumed*: the largest ratio |Vec E_i - Vec E_j| / |e_i - e_j| over the pairs of one half of the
    texts, and tried on those of the other half. `bound`: the assumed constant. `measured`: the largest ratio
    of the other half. holds: whether it is at most the bound, which chance alone makes it in half of all
    trials. vacuous: the constant is so large that, for half of the pairs, it allows any distance that occurs.
    The name says the share of pairs that break it and Spearman's rank correlation of the two distances, which
    is what can be relied on: -.73 on film reviews under MiniLM, where long texts are far apart in the first
    and near in the second. Raises NotEnough for fewer than 8 texts.
    """
    rows = check_vectors(pooled, "the pooled texts")
    wide = check_vectors(np.asarray(matrices).reshape(len(matrices), -1), "the embedding layer")
    if len(rows) != len(wide):
        raise SecureflError(f"{len(wide)} embedding-layer outputs for {len(rows)} pooled vectors")
    if len(rows) < LEAST_TEXTS:
        raise NotEnough(f"{len(rows)} texts, at least {LEAST_TEXTS} are needed for the pairs of two halves")
    order = rng.permutation(len(rows))
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    outer, inner = ([pdist(side[half]) for half in halves] for side in (wide, rows))
    # Texts that pool to the same vector refute it by themselves: a large ratio, and a finite one.
    least = 1e-12 * max(float(one.max()) for one in inner)
    ratios = [far / np.maximum(near, least) for far, near in zip(outer, inner, strict=True)]
    assumed, found = float(ratios[0].max()), float(ratios[1].max())
    broken = float((ratios[1] > assumed * (1 + _SLACK)).mean())
    rho = float(spearmanr(np.concatenate(outer), np.concatenate(inner)).statistic)
    said = f"rank correlation {rho:.2f}, {broken:.1%} of pairs break the constant of the others"
    return Bound(
        name=f"{name}: {said}",
        bound=assumed,
        measured=found,
        holds=found <= assumed * (1 + _SLACK),
        vacuous=bool(assumed * np.median(inner[1]) >= outer[1].max()),
    )


def largest_singular_value(
    function: Callable[[Tensor], Tensor], at: Tensor, rng: np.random.Generator
) -> float:
    """Largest singular value of the Jacobian of `function` at a point: its Lipschitz constant there.

    Lanczos (ARPACK) on products with J and J^T; J u is the derivative of <J^T v, u> by v, so no Jacobian is
    ever held. function: differentiable twice, to a vector of at least two numbers; attention runs as plain
    matrix products, since the fused kernels are not. Raises SecureflError where it is not finite.
    """
    with sdpa_kernel(SDPBackend.MATH):
        point = at.detach().clone().requires_grad_()
        value = function(point)
        probe = torch.zeros_like(value, requires_grad=True)
        (back,) = torch.autograd.grad(value, point, probe, create_graph=True)

        def ahead(direction: NDArray[Any]) -> NDArray[Any]:
            given = torch.from_numpy(direction).to(at).reshape(at.shape)
            (moved,) = torch.autograd.grad(back, probe, given, retain_graph=True)
            return np.asarray(moved.cpu().numpy().ravel())

        def behind(direction: NDArray[Any]) -> NDArray[Any]:
            given = torch.from_numpy(direction).to(value).reshape(value.shape)
            (moved,) = torch.autograd.grad(value, point, given, retain_graph=True)
            return np.asarray(moved.cpu().numpy().ravel())

        # Any direction sees NaN or a flat function, which the iteration could not say.
        seen = ahead(rng.standard_normal(at.numel()))
        if not np.isfinite(seen).all():
            raise SecureflError("the derivative of the encoder is not finite, so no constant bounds it")
        if not seen.any():
            return 0.0
        shape = (value.numel(), at.numel())
        jacobian = LinearOperator(shape, matvec=ahead, rmatvec=behind, dtype=np.float64)
        begin = rng.standard_normal(min(shape))
        return float(svds(jacobian, k=1, v0=begin, tol=_SETTLED, return_singular_vectors=False)[0])


def proposition_3(
    name: str,
    *,
    width: int,
    k: int,
    sigma: float,
    residuals: float,
    lipschitz: float,
    table_norm: float,
    measured: float,
    unreached: float = 0.0,
    delta: float = 3.0,
) -> Bound:
    """Proposition 3: how far a relaxed text read off a mean of k vectors is at least from one of the k texts.

    bound = [sqrt((d - 2 sqrt(d delta)) (1 - 1/k)) sigma - residuals] / (lipschitz table_norm) - unreached,
    for vectors ~ N(mu, sigma^2 I_d), with probability at least 1 - exp(-delta). width: d. k: rows behind the
    mean. sigma: of one number of a vector. residuals: |eps_i - epsbar|, of what is left between the encoder's
    output on the two relaxed texts and their targets. lipschitz: of the encoder with respect to its token
    vectors, which attention has only locally (`largest_singular_value` at the targets; so `holds` may be
    false). table_norm: |V|_F. measured: |Z_i* - Zbar|_F. unreached: |Zbar* - Zbar|_F; 0 where Zbar is what
    was reached, with its own residual, for which the inequality holds just as well.
    vacuous: nothing above 0 is promised, or k = 1, or d < 4 delta. And it never says which *tokens* come out.
    Raises SecureflError for numbers that are not finite or not positive where they must be.
    """
    numbers = (sigma, residuals, lipschitz, table_norm, measured, unreached, delta)
    if not all(map(math.isfinite, numbers)) or min(numbers) < 0 or min(lipschitz, table_norm) <= 0:
        raise SecureflError(f"{name}: is asked of numbers that are not finite, or negative")
    if k < 1 or width < 1:
        raise SecureflError(f"{name}: is asked of {k} rows of {width} numbers")
    scatter = max(0.0, width - 2 * math.sqrt(width * delta)) * (1 - 1 / k)
    bound = (math.sqrt(scatter) * sigma - residuals) / (lipschitz * table_norm) - unreached
    return Bound(
        name=name,
        bound=bound,
        measured=measured,
        holds=measured >= bound - _SLACK * abs(bound),
        vacuous=bound <= 0 or k == 1 or width < 4 * delta,
    )
