"""Sums of clipped per-unit gradients of a small model: the first half of a DP-SGD step.

This room clips and adds; it draws no noise, takes no step, samples no rows and keeps no account. The engines
agree to rounding: book-keeping, ours and the fast one, and two of Opacus, its fallback and its check.
"""

from __future__ import annotations

from securefl.gradients.clipped import ClippedSum, Engine, clipped_sum

__all__ = ["ClippedSum", "Engine", "clipped_sum"]
