"""A command for `enrolment.secondary` that answers as a synthetic GPU.

`python tests/vendors/gpu.py KEY CHAIN NONCE`: files with the attestation key and
its certificates in PEM, and the nonce in hexadecimal.
"""

import base64
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from vendors.nvidia import Report


def main(key_file: str, chain_file: str, nonce: str) -> None:
    """Print the answer."""
    key = load_pem_private_key(Path(key_file).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signed = Report(nonce=bytes.fromhex(nonce)).signed()
    r, s = decode_dss_signature(key.sign(signed, ec.ECDSA(hashes.SHA384())))
    report = signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")
    chain = Path(chain_file).read_text()
    print(json.dumps({"report": base64.b64encode(report).decode(), "certificates": chain}))


if __name__ == "__main__":
    main(*sys.argv[1:])
