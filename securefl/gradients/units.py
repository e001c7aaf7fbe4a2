"""Which rows of a physical batch belong to which unit of privacy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Units:
    """The rows of a batch of B grouped into U units.

    of_rows: (B,) int64, the unit of each row, 0..U-1 without gaps; where every unit is one row, row i is unit
    i. weights: (B,) float64, one over the number of rows of the row's unit. groups: for each number of rows n
    that units have, the units (U_n,) and their rows (U_n, n); grouped so that nothing is padded.
    """

    of_rows: Tensor
    weights: Tensor
    groups: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, numbers: Tensor) -> Units:
        """From (B,) int64 unit numbers, equal for rows of the same unit; gaps do not matter."""
        _, of_rows, sizes = torch.unique(numbers, return_inverse=True, return_counts=True)
        if len(sizes) == len(numbers):
            rows = torch.arange(len(numbers), device=numbers.device)
            return cls(
                rows, torch.ones(len(rows), dtype=torch.float64, device=rows.device), ((rows, rows[:, None]),)
            )
        order = torch.argsort(of_rows, stable=True)
        starts = sizes.cumsum(0) - sizes
        groups = []
        for size in sizes.unique().tolist():
            units = (sizes == size).nonzero()[:, 0]
            places = starts[units, None] + torch.arange(size, device=numbers.device)
            groups.append((units, order[places]))
        return cls(of_rows, 1 / sizes[of_rows].double(), tuple(groups))

    @property
    def count(self) -> int:
        """U."""
        return sum(len(units) for units, _ in self.groups)

    @property
    def single(self) -> bool:
        """Whether every unit is one row."""
        return self.count == len(self.of_rows)

    def summed(self, rows: Tensor) -> Tensor:
        """(U, ...): the sums over each unit's rows of (B, ...)."""
        if self.single:
            return rows
        return rows.new_zeros(self.count, *rows.shape[1:]).index_add_(0, self.of_rows, rows)

    def gathered(self, tensor: Tensor, group: int) -> Tensor:
        """(U_n, n * L, ...) of (B, L, ...): the rows of each unit of a group, one after the other."""
        return tensor if self.single else tensor[self.groups[group][1]].flatten(1, 2)
