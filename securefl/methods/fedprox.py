"""The proximal term of FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020).

Local training minimises F_k(w) + mu/2 ||w - w_t||^2, w_t the model that the silo received: the term keeps a
silo with unlike data from walking far from the others. The server averages as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def proximal_term(weights: Sequence[Tensor], start: Sequence[Tensor], mu: float) -> Tensor:
    """mu/2 times the squared L2 distance of `weights` from `start`, tensor by tensor of the same shapes.

    A scalar whose gradient is mu (w - w_t); `start` gets none. Raises ValueError for lists that do not match.
    """
    pairs = zip(weights, start, strict=True)
    distances = [(weight - fixed.detach()).square().sum() for weight, fixed in pairs]
    return 0.5 * mu * torch.stack(distances).sum()
