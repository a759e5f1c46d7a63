"""Completion-time model of a message over a long, lossy path (SDR-RDMA, arXiv:2505.05366 §4.2).

`completion` gives the distribution for a scheme as this stack runs it, `paper` for the paper's own
erasure coding; `sampling` has the Monte-Carlo simulation that checks both.
"""

from sealane.planning.model.blocks import block_losses, block_success, check_code, xor_success
from sealane.planning.model.completion import Completion
from sealane.planning.model.path import Loss, Path, ideal
from sealane.planning.model.ring import all_reduce, all_reduce_ideal
from sealane.planning.model.sampling import sample, sample_losses
from sealane.planning.model.schemes import (
    NACK_FACTOR,
    RTO_FACTOR,
    ErasureCoded,
    Scheme,
    SelectiveRepeat,
    completion,
    wire_units,
)

__all__ = [
    "NACK_FACTOR",
    "RTO_FACTOR",
    "Completion",
    "ErasureCoded",
    "Loss",
    "Path",
    "Scheme",
    "SelectiveRepeat",
    "all_reduce",
    "all_reduce_ideal",
    "block_losses",
    "block_success",
    "check_code",
    "completion",
    "ideal",
    "sample",
    "sample_losses",
    "wire_units",
    "xor_success",
]
