"""What a node trusts after its next start: its file, and what it has learned."""

from pathlib import Path

import pytest

from sealane.crypto.anchors import Succession, TrustAnchors
from sealane.crypto.certificates import CertificateAuthority
from sealane.daemon.node.kept_anchors import SUCCESSIONS_NAME, KeptAnchors, succession_message
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import VerificationError

A, B, C, D = (CertificateAuthority.create(broker="b", now=utc_now()) for _ in range(4))
A_TO_B = Succession.announce(A, B.certificate)
B_TO_C = Succession.announce(B, C.certificate)


def kept(path: Path, *authorities: CertificateAuthority) -> KeptAnchors:
    """Open as at a start whose operator's file has these."""
    anchors = TrustAnchors(*(each.certificate for each in authorities))
    return KeptAnchors(anchors, path / SUCCESSIONS_NAME)


def trusted(anchors: KeptAnchors) -> list[CertificateAuthority]:
    found = anchors.anchors.certificates
    return [each for each in (A, B, C, D) if each.certificate in found]


def test_what_was_learned_outlives_the_process(tmp_path: Path) -> None:
    steps = [
        (A_TO_B, [A, B]),
        (A_TO_B.retired(B), [B]),
        (B_TO_C, [B, C]),
        (B_TO_C.retired(C), [C]),
    ]
    node = kept(tmp_path, A)
    for statement, after in steps:
        assert node.learn(succession_message(statement))
        assert not node.learn(succession_message(statement))
        assert trusted(node) == after
        assert trusted(kept(tmp_path, A)) == after


def test_a_newer_file_of_the_operator_counts(tmp_path: Path) -> None:
    node = kept(tmp_path, A)
    node.learn(succession_message(A_TO_B.retired(B)))
    node.learn(succession_message(B_TO_C.retired(C)))
    assert trusted(kept(tmp_path, B, C)) == [C]
    assert trusted(kept(tmp_path, C)) == [C]
    # Of other brokers: what was learned of these says nothing there.
    assert trusted(kept(tmp_path, D)) == [D]


def test_a_refused_statement_changes_nothing(tmp_path: Path) -> None:
    node = kept(tmp_path, A)
    with pytest.raises(VerificationError, match=r"anchors\.succession\.signature"):
        node.learn(succession_message(A_TO_B.retired(D)))
    assert trusted(node) == [A]
    assert not (tmp_path / SUCCESSIONS_NAME).exists()


def test_what_cannot_be_kept_is_not_trusted(tmp_path: Path) -> None:
    node = kept(tmp_path / "missing", A)
    with pytest.raises(Exception, match="missing"):
        node.learn(succession_message(A_TO_B))
    assert trusted(node) == [A]


@pytest.mark.parametrize("content", [b"\xff\xff", b"\x0a\x02\x0a\x00"])
def test_a_file_that_no_node_wrote_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SUCCESSIONS_NAME).write_bytes(content)
    with pytest.raises(VerificationError, match=r"anchors\.succession\.malformed"):
        kept(tmp_path, A)
