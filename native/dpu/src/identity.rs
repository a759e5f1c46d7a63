//! The card's statement about itself (docs/formats/card.md, "Evidence").

use std::io;
use std::path::Path;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair};
use sealane_proto::digest::sha256;

const EVIDENCE: &str = "sealane card evidence v1";
const STATEMENT: &str = "sealane card statement v1";

/// What the card signs with, and what it says about its own program.
#[derive(Debug)]
pub struct Identity {
    key: EcdsaKeyPair,
    certificates: Vec<u8>,
    firmware: [u8; 32],
}

impl Identity {
    /// Reads the key and its certificates, and measures the program that runs.
    pub fn read(key: &Path, certificates: &Path) -> io::Result<Self> {
        let named = |path: &Path, error: &dyn std::fmt::Display| {
            io::Error::other(format!("{}: {error}", path.display()))
        };
        let read = |path: &Path| std::fs::read(path).map_err(|error| named(path, &error));
        Ok(Self {
            key: EcdsaKeyPair::from_pkcs8(&ECDSA_P384_SHA384_ASN1_SIGNING, &read(key)?)
                .map_err(|error| named(key, &error))?,
            certificates: read(certificates)?,
            firmware: sha256(&std::fs::read("/proc/self/exe")?),
        })
    }

    /// Evidence that answers `nonce`. An emulated card's bus is never protected.
    pub fn evidence(&self, nonce: &[u8; 32], profile: &str) -> Option<Vec<u8>> {
        let parts = [&nonce[..], profile.as_bytes(), &self.firmware[..], &[0]];
        let statement = fields(STATEMENT, &parts);
        let signature = self.key.sign(&SystemRandom::new(), &statement).ok()?;
        Some(fields(EVIDENCE, &[&statement, signature.as_ref(), &self.certificates]))
    }
}

/// A label and parts, each after its length as four bytes, big-endian.
fn fields(label: &str, parts: &[&[u8]]) -> Vec<u8> {
    let mut made = Vec::new();
    for part in std::iter::once(&label.as_bytes()).chain(parts) {
        made.extend_from_slice(&(part.len() as u32).to_be_bytes());
        made.extend_from_slice(part);
    }
    made
}
