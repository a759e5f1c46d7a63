//! The interface of stores to background jobs, which check a store's contents and refresh its
//! fast-path MACs piece by piece.

use std::io;
use std::ops::Range;

use sealane_proto::nvme::Reason;

/// Maximum blocks of a piece: a host's command waits no longer than one piece takes (128 KiB).
pub const PIECE_BLOCKS: u64 = 32;

/// Something that a job found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The reason for which reads of it fail, or will fail.
    pub reason: Reason,
    /// The block, or the first block that a wrong page covers; None if no particular one is
    /// affected.
    pub lba: Option<u64>,
    /// Description.
    pub detail: String,
    /// Whether the store knows the right contents and writes them again at the end of the job.
    pub is_known: bool,
}

/// The results of a job for one piece.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of written blocks checked, right or wrong.
    pub checked: u64,
    /// Number of blocks that may or may not be written, as their leaf page is wrong.
    pub unchecked: u64,
    /// Number of blocks that now have a current fast-path MAC.
    pub refreshed: u64,
    /// Bytes read from the device and written to it.
    pub bytes: u64,
    /// The faults found.
    pub findings: Vec<Finding>,
}

/// Checks and refreshes the blocks of one store, for one job. Calls block.
///
/// The caller holds the range lock of the piece: shared to scrub it, exclusive to refresh it. An
/// error ends the job: the device has failed. All other faults are in the report.
pub trait Upkeep: Send {
    /// The next piece from `lba` on with something to check, at most [`PIECE_BLOCKS`] of one set.
    fn next_piece(&mut self, lba: u64) -> Option<Range<u64>>;
    /// Checks the next part of the store's own structures, apart from leaf pages and blocks. False
    /// if none is left. No range lock is needed.
    fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool>;
    /// Reads a piece from the device, including its leaf page, and checks it.
    fn scrub(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()>;
    /// Durably rewrites everything that was found wrong and whose right contents are known. No
    /// range lock is needed.
    fn repair(&mut self) -> io::Result<()>;
    /// Whether blocks of this store have fast-path MACs.
    fn has_fast_path(&self) -> bool;
    /// Issues fast-path MACs for the blocks of a piece, each after a full check; skips blocks with
    /// changes that aren't merged yet.
    fn refresh(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()>;
}
