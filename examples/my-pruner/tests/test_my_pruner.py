"""The promises of sparsellm's interfaces, and what is special about this package."""

import torch
from my_pruner.in_order import InOrder
from my_pruner.ria import RIA
from my_pruner.shared_nm import SharedNM

from sparsellm import NM
from sparsellm.testing import parametrize_with_checks


@parametrize_with_checks([RIA(), RIA(power=1.0), InOrder(), SharedNM(NM(2, 4), 8)])
def test_promises(subject, check) -> None:
    check(subject)


def test_rows_share_their_zeros() -> None:
    keep = SharedNM(NM(2, 4), 2).keep(torch.tensor([[1.0, 2.0, 3.0, 4.0], [9.0, 1.0, 1.0, 1.0]]))
    assert keep.tolist() == [[True, False, False, True]] * 2  # sums of 10, 3, 4 and 5
