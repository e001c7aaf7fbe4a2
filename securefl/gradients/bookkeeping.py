"""Per-unit norms and clipped sums from one forward and one backward pass, without per-unit gradients.

Book-keeping (Bu, Wang, Zha, Karypis: Differentially Private Optimization on Large Foundation Models at Small
Cost, ICML 2023). For a linear layer with inputs a (T, d) and output gradients g (T, p) of a unit's T tokens,
the weight gradient is g^T a, its squared norm the sum over (a a^T) * (g g^T) (Gram matrices of T x T), and
the clipped sum over units one matrix product with the output gradients re-weighted. A layer that is smaller
than its tokens has its gradients made row by row at once instead. Nothing here adds noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from securefl.errors import SecureflError
from securefl.gradients.layers import is_linear, noting, wide
from securefl.gradients.units import Units
from securefl.slm import Slm

_CANCELLED = 1e-2  # of what the pairs of tokens have without their signs
_TINY = 1e-24  # a squared norm below which a factor of it may have rounded to 0
_CHUNK = 2**22  # values of per-unit gradients held at a time where only their norms are wanted
_Pair = tuple[Tensor, Tensor]


class _Layer:
    """A layer whose parameters train, and their places in `Slm.trained`."""

    def __init__(self, layer: nn.Module, weight: int | None, bias: int | None) -> None:
        self.linear = is_linear(layer)
        self.table = isinstance(layer, nn.Embedding)
        self.transposed = self.linear and not isinstance(layer, nn.Linear)
        self.padding = layer.padding_idx if isinstance(layer, nn.Embedding) else None
        self.weight, self.bias = weight, bias


class _Records:
    """What one backward pass over B rows says of every trained parameter; then their norms and sums."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[int, Tensor] = {}  # parameter -> (B, *shape), per-row gradients
        self._pairs: dict[_Layer, list[_Pair]] = {}  # layer -> (B, L, d) and (B, L, p) of each use
        self._grams: dict[tuple[object, ...], tuple[Tensor, list[Tensor]]] = {}
        self.losses: Tensor

    def note(self, layer: _Layer, given: Tensor, gradient: Tensor) -> None:
        """One use of a layer: its input (indices for a table) and the gradient of its output."""
        if gradient.shape[0] != self._count or given.shape[0] != self._count:
            raise SecureflError("a layer mixes the rows of a batch, so no row has a gradient of its own")
        gradient = gradient.reshape(self._count, -1, gradient.shape[-1])
        if layer.table:
            self._pairs.setdefault(layer, []).append((given.reshape(self._count, -1), gradient))
            return
        if layer.bias is not None:
            self._add(layer.bias, wide(gradient).sum(1))
        if layer.weight is None:
            return
        given = given.reshape(self._count, -1, given.shape[-1])
        if not layer.linear:
            self._add(layer.weight, given.mul_(gradient).sum(1))
            return
        length, (d, p) = given.shape[1], (given.shape[2], gradient.shape[2])
        if p * d <= length * (p + d):
            self._add(layer.weight, _products(layer, given, gradient))
        else:
            self._pairs.setdefault(layer, []).append((given, gradient))

    def _add(self, parameter: int, rows: Tensor) -> None:
        known = self._rows.get(parameter)
        self._rows[parameter] = rows if known is None else known.add_(rows)

    def squares(self, units: Units, groups: Sequence[int]) -> Tensor:
        """(G, U) float64: squared norms of the units' gradients over each group of parameters."""
        for layer in [one for one in self._pairs if one.weight in self._rows]:  # used both ways
            for given, gradient in self._pairs.pop(layer):
                assert layer.weight is not None
                self._add(layer.weight, _products(layer, given, gradient))
        shape = 1 + max(groups), units.count
        squares = torch.zeros(shape, dtype=torch.float64, device=units.of_rows.device)
        for parameter, rows in self._rows.items():
            squares[groups[parameter]] += _square(units.summed(rows))
        for layer, uses in self._pairs.items():
            assert layer.weight is not None
            given, gradient = _joined(uses)
            for i, (which, _) in enumerate(units.groups):
                found = self._group_squares(layer, given, gradient, units, i)
                squares[groups[layer.weight], which] += found
        self._grams.clear()
        return squares

    def _group_squares(
        self, layer: _Layer, given: Tensor, gradient: Tensor, units: Units, group: int
    ) -> Tensor:
        """(U_n,) float64: squared norms of one layer for the units of a group."""
        a, g = units.gathered(given, group), units.gathered(gradient, group)
        if layer.table:
            parts = self._gram(gradient, units, group) * _same(layer, a)
        elif a.shape[1] * (a.shape[2] + g.shape[2]) <= a.shape[2] * g.shape[2]:
            parts = self._gram(gradient, units, group) * self._gram(given, units, group)
        else:
            return _direct(layer, a, g)
        found = parts.sum((1, 2)).double()
        # Where tokens cancel, rounding may hide a norm from the sum over pairs, but not from the gradient.
        size = parts.abs_().sum((1, 2))
        # A product of a tiny input and a huge gradient may round to 0 in one factor and be none in the whole.
        hidden = (found < _CANCELLED * size) | (size < _TINY)
        if hidden.any():
            found[hidden] = _direct(layer, a[hidden], g[hidden])
        return found

    def _gram(self, x: Tensor, units: Units, group: int) -> Tensor:
        """(U_n, T, T) of (B, L, d) for the units of a group; queries, keys and values share their input's."""
        # The tensor is kept with its products: its address means nothing once it is freed.
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        _, grams = self._grams.setdefault(key, (x, []))
        if len(grams) <= group:
            gathered = wide(units.gathered(x, group))
            grams.append(torch.bmm(gathered, gathered.mT))
        return grams[group]

    def add_to(self, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """Add the sum of the rows' gradients times each parameter's `scales` (B,); uses up the records."""
        for parameter, rows in self._rows.items():
            total = sums[parameter].view(-1)
            total.addmv_(rows.view(self._count, -1).T, scales[parameter].to(rows.dtype))
        self._rows.clear()
        while self._pairs:
            layer, uses = self._pairs.popitem()
            assert layer.weight is not None
            total, own = sums[layer.weight], scales[layer.weight]
            for given, gradient in uses:
                if layer.table:
                    weights = own[:, None].expand(given.shape)
                    if layer.padding is not None:
                        weights = weights.masked_fill(given == layer.padding, 0)
                    weighted = wide(gradient) * weights[:, :, None].to(wide(gradient).dtype)
                    total.index_add_(0, given.flatten(), weighted.flatten(0, 1))
                    continue
                a, g = wide(given), wide(gradient)
                if a.shape[2] <= g.shape[2]:
                    a = a * own[:, None, None].to(a.dtype)
                else:
                    g = g * own[:, None, None].to(g.dtype)
                left, right = (a, g) if layer.transposed else (g, a)
                total.addmm_(left.flatten(0, 1).T, right.flatten(0, 1))


def _products(layer: _Layer, given: Tensor, gradient: Tensor) -> Tensor:
    """(n, *weight shape): the weight gradients of n groups of tokens."""
    left, right = (given, gradient) if layer.transposed else (gradient, given)
    return torch.bmm(wide(left).mT, wide(right))


def _direct(layer: _Layer, given: Tensor, gradient: Tensor) -> Tensor:
    """(n,) float64: squared norms of n units by way of their gradients, a few at a time."""
    if layer.table:
        pairs = zip(given, wide(gradient), strict=True)
        return torch.stack([_table_square(layer, indices, g) for indices, g in pairs])
    step = max(1, _CHUNK // (given.shape[2] * gradient.shape[2]))
    chunks = zip(torch.split(given, step), torch.split(gradient, step), strict=True)
    return torch.cat([_square(_products(layer, a, g)) for a, g in chunks])


def _table_square(layer: _Layer, indices: Tensor, gradient: Tensor) -> Tensor:
    """() float64: the squared norm of a table's gradient from (T,) indices and (T, e) output gradients."""
    if layer.padding is not None:
        gradient = gradient * (indices != layer.padding)[:, None]
    used, rows = torch.unique(indices, return_inverse=True)
    return _square(gradient.new_zeros(1, len(used), gradient.shape[1]).index_add_(1, rows, gradient[None]))[0]


def _same(layer: _Layer, indices: Tensor) -> Tensor:
    """(n, T, T), true where two tokens have the same row of a table: they add up before they are squared."""
    same = indices[:, :, None] == indices[:, None, :]
    if layer.padding is not None:
        same &= (indices != layer.padding)[:, None, :]
    return same


def _square(x: Tensor) -> Tensor:
    """(n,) float64: the squared norm of each of n tensors."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.double().square()


def _joined(uses: Sequence[_Pair]) -> _Pair:
    """All uses of a layer in one forward pass, as if of one longer text."""
    if len(uses) == 1:
        return uses[0]
    return torch.cat([given for given, _ in uses], 1), torch.cat([gradient for _, gradient in uses], 1)


class BookKeeping:
    """The layers of a model whose parameters train, made to note what a backward pass says of them."""

    name = "book-keeping"

    def __init__(self, slm: Slm) -> None:
        self._slm = slm
        self._records: _Records | None = None

    def uncovered(self) -> str | None:
        """The name of a module with a trained parameter that this engine cannot handle, if there is one."""
        seen: set[nn.Parameter] = set()
        name: str
        for name, module in self._slm.model.named_modules():
            own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
            if own and (
                not own.keys() <= {"weight", "bias"}
                or noting(module, lambda *_: None) is None
                or not seen.isdisjoint(own.values())
            ):
                return name
            seen.update(own.values())
        return None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Forward methods replaced inside the block. The caller puts modules back as they were."""
        places = {p: i for i, p in enumerate(self._slm.trained())}
        for module in self._slm.model.modules():
            own = dict(module.named_parameters(recurse=False))
            weight, bias = (places.get(own[key]) if key in own else None for key in ("weight", "bias"))
            if weight is not None or bias is not None:
                self._replace(module, _Layer(module, weight, bias))
        yield

    def _replace(self, module: nn.Module, layer: _Layer) -> None:
        plain = module.forward

        def note(given: Tensor, gradient: Tensor) -> None:
            assert self._records is not None
            self._records.note(layer, given, gradient)

        noted = noting(module, note)
        assert noted is not None

        def forward(*given: Tensor, **named: Tensor) -> Tensor:
            if self._records is None:
                out: Tensor = plain(*given, **named)
                return out
            (x,) = (*given, *named.values())
            return noted(x)

        module.forward = forward

    def run(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Units,
        precision: AbstractContextManager[object],
    ) -> _Records:
        """One forward pass in a `precision` and one backward pass."""
        self._records = records = _Records(len(labels))
        try:
            with precision:
                logits = self._slm(batch)
            records.losses = row_losses(logits, labels, units)
            torch.autograd.backward(records.losses.sum())
        finally:
            self._records = None
        records.losses = records.losses.detach()
        return records


def row_losses(logits: Tensor, labels: Tensor, units: Units) -> Tensor:
    """(B,): cross-entropies, each over the number of rows of its unit."""
    losses = torch.nn.functional.cross_entropy(wide(logits), labels, reduction="none")
    return losses * units.weights.to(losses.dtype)
