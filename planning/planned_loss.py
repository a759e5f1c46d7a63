"""Bound of the losses that plans are made for.

It stands by itself: configuration has it checked, and must not import the model and numpy for that.
"""

from typing import Final

PLANNED_LOSS_MAX: Final = 0.1
"""Loss that plans are made for, most: parity within the budget mends little more, the model is
checked up to here, and takes minutes for one size far beyond. The rest is repeated."""
