"""The threat classes that attestation must resist, and the tests for each.

Every test named here must exist; a class without tests is a gap.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

COVERED = {
    "replayed evidence": {
        "trust/test_verifier_service.py": [
            "test_evidence_is_taken_once",
            "test_of_two_at_once_one_wins",
            "test_evidence_of_another_session_is_refused",
            "test_challenge_of_another_verifier_or_start_is_stale",
        ],
        "trust/test_tpm2.py": ["test_replayed_evidence_is_refused"],
        "trust/test_confidential_nodes.py": ["test_evidence_of_one_session_is_none_in_another"],
        "crypto/test_attestation.py": ["test_nonce_is_used_once_even_by_a_failed_attempt"],
    },
    "stale or foreign nonce": {
        "crypto/test_attestation.py": [
            "test_expired_challenge_is_refused",
            "test_each_field_of_runtime_data_is_checked",
            "test_evidence_over_other_runtime_data_is_refused",
        ],
        "crypto/evidence/test_snp.py": ["test_runtime_data_is_committed_to"],
        "crypto/evidence/test_tdx.py": ["test_the_runtime_data_is_committed_to"],
        "crypto/evidence/test_tpm2.py": ["test_quote_that_binds_nothing_is_refused"],
    },
    "wrong measurement": {
        "crypto/test_appraisal.py": [
            "test_every_bit_of_a_measurement_counts",
            "test_field_that_the_policy_leaves_out_refuses",
            "test_empty_policy_refuses",
            "test_devices_can_veto",
        ],
        "trust/test_hardware_vectors.py": ["test_one_bit_of_any_measurement_decides"],
        "trust/test_tpm2.py": ["test_machine_that_booted_something_else_is_refused"],
    },
    "debug": {
        "crypto/test_appraisal.py": ["test_each_claim_is_refused_alone"],
        "crypto/evidence/test_snp_vectors.py": ["test_debug_is_seen"],
        "crypto/evidence/test_tdx_vectors.py": ["test_debug_is_refused"],
        "trust/test_hardware_vectors.py": ["test_debug_is_refused"],
    },
    "revoked or old TCB": {
        "crypto/evidence/test_snp.py": ["test_a_revoked_signing_key_is_refused"],
        "crypto/evidence/test_tdx.py": [
            "test_revoked_certificates_are_refused",
            "test_a_revoked_level_is_refused",
        ],
        "crypto/evidence/test_tdx_vectors.py": [
            "test_older_collateral_of_a_platform_is_refused_after_newer"
        ],
        "crypto/test_appraisal.py": ["test_each_claim_is_refused_alone"],
        "trust/test_hardware_vectors.py": ["test_each_tcb_component_has_its_minimum"],
    },
    "expired or not yet valid": {
        "crypto/evidence/test_snp_vectors.py": ["test_a_vlek_expires"],
        "crypto/evidence/test_snp.py": ["test_a_revocation_list_out_of_its_time_is_refused"],
        "crypto/evidence/test_tdx_vectors.py": ["test_v4_is_refused_outside_its_window"],
        "crypto/test_certificates.py": ["test_leaf_out_of_its_time_is_refused"],
        "crypto/test_ear.py": ["test_skew_is_allowed_before_and_never_after"],
    },
    "mix and match": {
        "crypto/evidence/test_snp.py": ["test_a_report_of_another_chips_key_is_refused"],
        "crypto/evidence/test_tpm2.py": ["test_quote_of_another_attestation_key_is_refused"],
        "trust/test_confidential_nodes.py": [
            "test_keys_that_were_not_attested_are_refused",
            "test_a_gpus_answer_to_somebody_else_is_refused",
        ],
        "crypto/test_ear.py": ["test_result_beside_another_certificate_is_refused"],
        "crypto/test_appraisal.py": ["test_devices_can_veto"],
    },
    "downgrade": {
        "runtime/test_calls.py": ["test_enrolment_takes_tls_1_3_only"],
        "crypto/test_ear.py": [
            "test_other_algorithms_are_refused",
            "test_header_that_brings_a_key_is_refused",
        ],
        "trust/test_verifier_service.py": [
            "test_type_that_the_policy_does_not_take_is_refused_and_recorded"
        ],
        "crypto/test_attestation.py": ["test_software_driver_is_refused_unless_allowed"],
        "trust/test_hardware_vectors.py": ["test_version_2_is_refused_where_3_is_required"],
        "trust/test_policy_keeper.py": ["test_unsigned_file_stops_the_start"],
    },
    "token theft": {
        "runtime/test_calls.py": [
            "test_stolen_or_missing_result_is_refused",
            "test_result_ends_with_its_certificate",
        ],
        "trust/test_channels.py": [
            "test_another_leaf_of_the_same_broker_is_no_substitute",
            "test_call_on_a_live_connection_ends_with_the_callers_leaf",
        ],
        "crypto/test_ear.py": [
            "test_result_beside_another_certificate_is_refused",
            "test_skew_is_allowed_before_and_never_after",
            "test_another_verifiers_key_is_refused",
        ],
    },
    "relay, diversion, cuckoo": {
        "trust/test_channels.py": ["test_peer_that_is_not_attested_is_not_called"],
        "trust/test_membership.py": [
            "test_only_the_attested_incarnation_is_authorized",
            "test_process_that_was_superseded_does_not_come_back",
        ],
        "crypto/test_appraisal.py": [
            "test_each_claim_is_refused_alone",
            "test_listed_hardware_is_only_what_it_is_listed_as",
        ],
        "trust/test_hardware_vectors.py": ["test_an_unlisted_chip_is_refused"],
        "trust/test_tpm2.py": ["test_tpm_that_is_not_listed_or_listed_otherwise_is_refused"],
        "crypto/test_kem.py": ["test_truncated_changed_or_foreign_secret_is_refused"],
    },
    "evidence oracle": {
        "trust/test_tpm2.py": ["test_key_that_the_tpm_did_not_make_is_refused"],
        "crypto/evidence/test_tpm2.py": [
            "test_kem_key_must_be_born_in_the_tpm",
            "test_attestation_key_must_be_restricted_and_the_tpms_own",
        ],
    },
    "clock skew": {
        "crypto/test_ear.py": ["test_skew_is_allowed_before_and_never_after"],
        "trust/test_authorizations.py": ["test_delayed_answer_gains_no_time"],
        "trust/test_verifier_service.py": [
            "test_challenges_expire_by_a_clock_that_nobody_sets",
            "test_hardware_whose_clock_went_back_is_refused",
        ],
    },
    "denial of service": {
        "trust/test_verifier_service.py": [
            "test_oversized_evidence_costs_nothing",
            "test_verifications_that_wait_are_bounded",
            "test_one_prefix_is_slowed_down_and_others_are_not",
        ],
        "crypto/test_attestation.py": ["test_one_address_cannot_take_every_challenge"],
        "crypto/evidence/test_cmw.py": [
            "test_every_truncation_is_refused",
            "test_other_encodings_are_refused",
            "test_size_is_looked_at_first",
        ],
        "fuzz/test_corpora.py": ["test_the_corpus_holds"],
    },
    "malleability": {
        "crypto/evidence/test_tdx_vectors.py": [
            "test_a_newline_of_the_chain_may_change_and_the_identity_stays"
        ],
        "crypto/evidence/test_snp.py": [
            "test_the_other_ecdsa_signature_of_a_report_is_the_same_report"
        ],
        "crypto/test_ear.py": ["test_signature_in_its_other_form_is_the_same_result"],
        "crypto/evidence/test_cmw.py": ["test_a_changed_byte_gives_another_collection_or_none"],
        "crypto/test_attestation.py": ["test_runtime_data_has_one_encoding"],
    },
    "lease safety": {
        "trust/test_revocation.py": ["test_revoked_gateway_is_cut_off_within_the_bound"],
        "broker/test_instance.py": [
            "test_every_start_has_its_own_epoch",
            "test_store_put_back_never_repeats_an_epoch_and_is_refused",
        ],
        "gateway/test_leases.py": ["test_what_nobody_takes_back_is_burned_and_forgotten"],
    },
    "limits of a compromised broker": {
        "broker/test_hsm.py": ["test_a_key_that_could_leave_the_token_is_refused"],
        "crypto/test_audit.py": [
            "test_changed_record_shows_at_the_next_one",
            "test_rewritten_log_shows_at_its_checkpoint",
            "test_cut_log_shows_against_a_head_kept_elsewhere",
        ],
        "broker/test_audit_log.py": ["test_older_log_put_back_is_refused"],
        "trust/test_policy_keeper.py": [
            "test_policy_without_its_owners_signature_is_refused",
            "test_version_is_used_once",
        ],
    },
    "secrets hygiene": {
        "trust/test_verifier_service.py": [
            "test_unknown_and_forbidden_hear_the_same",
            "test_broken_evidence_hears_the_same_and_is_told_apart_in_the_audit",
            "test_records_hold_no_key",
        ],
    },
}


def test_there_are_seventeen() -> None:
    assert len(COVERED) == 17


@pytest.mark.parametrize("threat", COVERED)
def test_threat_is_covered_by_tests_that_exist(threat: str) -> None:
    for path, names in COVERED[threat].items():
        tree = ast.parse((TESTS / path).read_text())
        defined = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert names
        assert set(names) <= defined, path
