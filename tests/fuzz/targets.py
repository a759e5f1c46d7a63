"""All Python parsers reachable by bytes from the network, in either role, as fuzz targets.

A target takes bytes and asserts what must hold whatever the peer does. The targets for Rust
parsers are in `native/fuzz`.
"""

from collections.abc import Callable, Mapping
from typing import Final

from fuzz.admin import admin_controller, connect
from fuzz.attestation import (
    attestation_result,
    audit_record,
    policy_document,
    policy_owners,
    policy_signatures,
    runtime_data,
)
from fuzz.authentication import authentication_controller, authentication_host, secret
from fuzz.devices import anchor_file, device_file
from fuzz.evidence import (
    certificates,
    collateral_item,
    evidence_collection,
    nvidia_evidence,
    snp_evidence,
    tdx_evidence,
    tpm2_event_log,
    tpm2_evidence,
    tpm2_introduction,
)
from fuzz.host import discovery_log, host_pages, initiator_stream, nqn
from fuzz.listener import listener, pdu_stream

TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    target.__name__: target
    for target in (
        connect,
        admin_controller,
        authentication_controller,
        authentication_host,
        secret,
        nqn,
        host_pages,
        discovery_log,
        initiator_stream,
        pdu_stream,
        listener,
        runtime_data,
        attestation_result,
        policy_document,
        policy_owners,
        policy_signatures,
        audit_record,
        evidence_collection,
        snp_evidence,
        tdx_evidence,
        nvidia_evidence,
        tpm2_introduction,
        tpm2_evidence,
        tpm2_event_log,
        certificates,
        collateral_item,
        device_file,
        anchor_file,
    )
}
