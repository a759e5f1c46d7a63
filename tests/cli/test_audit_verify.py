"""`sealanectl audit verify` without the broker that wrote the log."""

import datetime as dt
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from control_plane import sealanectl
from sealane.crypto.audit import Chain, Head

NOW = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)


def test_retirement_that_nobody_checked_is_none(tmp_path: Path) -> None:
    retired = Head(sequence=7, digest=bytes([7]) * 32)
    chain = Chain(retired)
    # Anybody's key: without the anchor, nobody knows the broker's.
    key = ec.generate_private_key(ec.SECP256R1())
    log = tmp_path / "log.jsonl"
    log.write_bytes(chain.segment(key, former="audit.jsonl", beginning=retired, now=NOW))
    refused = sealanectl("audit", "verify", log, "--chain-only")
    assert refused.returncode == 3
    assert refused.stderr.endswith("[audit.beginning.missing]\n")
    # A head that was kept elsewhere has the hash of all that was.
    head = f"{chain.head.sequence}:{chain.head.digest.hex()}"
    assert sealanectl("audit", "verify", log, "--head", head).returncode == 0
