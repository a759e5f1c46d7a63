"""A node's identity: evidence, enrolment, certificates, and calls between attested peers."""
