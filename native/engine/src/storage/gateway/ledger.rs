//! Log of every seal, for tests that look for an IV used twice. Off unless a test enables it.
//!
//! A record has 56 bytes: key epoch (4) ‖ IV (12) ‖ SHA-256 of the plaintext (32) ‖ LBA (8), little
//! endian. It is appended in one write before the sealed bytes leave the process, so records are
//! complete and whole even if a process is killed or several processes write.

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

    /// Records that `plain` was sealed as `block`.
    pub(super) fn note(&self, epoch: u32, lba: u64, plain: &[u8], block: &Block) -> io::Result<()> {
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend_from_slice(&epoch.to_le_bytes());
        record.extend_from_slice(&block_iv(block));
        record.extend_from_slice(&sha256(plain));
        record.extend_from_slice(&lba.to_le_bytes());
        (&self.0).write_all(&record)
    }
}
