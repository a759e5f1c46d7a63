//! What background jobs of a namespace ask of its store: to check what it holds, and to refresh it,
//! piece by piece.

use std::io;
use std::ops::Range;

use sealane_proto::nvme::Reason;

/// Blocks of a piece at most: a host's command waits no longer than one piece takes (128 KiB).
pub const PIECE_BLOCKS: u64 = 32;

/// Something that a job found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Why reads of it fail, or will.
    pub reason: Reason,
    /// The block, or the first one that a page tells of; None: it tells of no certain one.
    pub lba: Option<u64>,
    /// In words.
    pub detail: String,
    /// Whether the store knows what is right, and writes it again when the job is through.
    pub is_known: bool,
}

/// What a job did with one piece.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Written blocks that were looked at, right or wrong.
    pub checked: u64,
    /// Blocks of which nobody can tell whether they are written: their leaf page is wrong.
    pub unchecked: u64,
    /// Blocks that have a current fast-path MAC now.
    pub refreshed: u64,
    /// Bytes read from the device and written to it.
    pub bytes: u64,
    /// What is wrong.
    pub findings: Vec<Finding>,
}

/// Looks after the blocks of one store, for one job. Calls block.
///
/// The caller holds the range lock of the piece: shared to scrub it, exclusive to refresh it. An
/// error ends the job: the device is gone. All else that is wrong is in the report.
pub trait Upkeep: Send {
    /// The next piece from `lba` on with something to look at, at most [`PIECE_BLOCKS`] of one set.
    fn next_piece(&mut self, lba: u64) -> Option<Range<u64>>;
    /// Checks a part of what the store has on its device beside leaf pages and blocks; false: nothing
    /// is left. No range lock is needed.
    fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool>;
    /// Reads a piece from the device, its leaf page too, and checks it.
    fn scrub(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()>;
    /// Writes again, durably, all that was found wrong and is known. No range lock is needed.
    fn repair(&mut self) -> io::Result<()>;
    /// Whether blocks of this store have fast-path MACs.
    fn has_fast_path(&self) -> bool;
    /// Gives the blocks of a piece fast-path MACs, each after a full check; those with changes that
    /// wait to be merged are passed over.
    fn refresh(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()>;
}
