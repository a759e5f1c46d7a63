//! Record of every seal, for tests that look for an IV used twice. Off unless a test asks for it.
//!
//! A record has 56 bytes: key epoch (4) ‖ IV (12) ‖ SHA-256 of the plaintext (32) ‖ LBA (8), little
//! endian. It is written before the sealed bytes go anywhere, in one append, so that records of a
//! killed process and of several processes are all there and whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use sealane_proto::digest::sha256;
use sealane_proto::sector::{Block, IV_BYTES, block_iv};

/// Bytes of one record.
const RECORD_BYTES: usize = 4 + IV_BYTES + 32 + 8;

/// An append-only file of records.
#[derive(Debug)]
pub(super) struct Ledger(File);

impl Ledger {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        OpenOptions::new().append(true).create(true).mode(0o600).open(path).map(Self)
    }

    /// Notes that `plain` became `block`.
    pub(super) fn note(&self, epoch: u32, lba: u64, plain: &[u8], block: &Block) -> io::Result<()> {
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend_from_slice(&epoch.to_le_bytes());
        record.extend_from_slice(&block_iv(block));
        record.extend_from_slice(&sha256(plain));
        record.extend_from_slice(&lba.to_le_bytes());
        (&self.0).write_all(&record)
    }
}
