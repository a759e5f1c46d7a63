//! Anchors: a small memory that no one can put back, where a store notes how far it has come.

use std::fmt::Debug;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::codec::{get, get_u64};
use super::keys::{TAG_BYTES, Tag};

/// Bytes of an anchored state.
pub const ANCHORED_BYTES: usize = 1 + 4 * 8 + 2 * TAG_BYTES;
/// First byte of an anchored state.
const VERSION: u8 = 1;

/// How far a store has come: what an anchor remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchored {
    /// Counts advances of the anchor; grows by one each.
    pub number: u64,
    /// Epoch of the opening.
    pub epoch: u64,
    /// Number of the checkpoint that the log goes on from.
    pub checkpoint: u64,
    /// Its tag.
    pub checkpoint_tag: Tag,
    /// Log pages before this one are flushed.
    pub log_flushed: u64,
    /// Tag of the last of them.
    pub log_tag: Tag,
}

impl Anchored {
    /// As bytes, for who keeps it.
    #[must_use]
    pub fn encode(&self) -> [u8; ANCHORED_BYTES] {
        let mut bytes = [0; ANCHORED_BYTES];
        bytes[0] = VERSION;
        let mut at = 1;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.number.to_le_bytes());
        put(&self.epoch.to_le_bytes());
        put(&self.checkpoint.to_le_bytes());
        put(&self.checkpoint_tag);
        put(&self.log_flushed.to_le_bytes());
        put(&self.log_tag);
        bytes
    }

    /// Parses what was kept under this number; None if it is something else, or of another number.
    #[must_use]
    pub fn decode_as(number: u64, bytes: &[u8]) -> Option<Self> {
        Self::decode(bytes).filter(|found| found.number == number)
    }

    /// Parses what was kept; None if it is something else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ANCHORED_BYTES] = bytes.try_into().ok()?;
        let rest = &mut &bytes[..];
        (get(rest) == [VERSION]).then(|| Self {
            number: get_u64(rest),
            epoch: get_u64(rest),
            checkpoint: get_u64(rest),
            checkpoint_tag: get(rest),
            log_flushed: get_u64(rest),
            log_tag: get(rest),
        })
    }
}

/// Why an anchor wasn't advanced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnchorError {
    /// No answer in time: whether it was advanced isn't known. The same state is tried again.
    #[error("the anchor can't be reached: {0}")]
    Unreachable(String),
    /// Another state stands under that number: somebody else writes this store.
    #[error("the anchor was advanced by somebody else: {0}")]
    Lost(String),
}

/// When an anchor is advanced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorPolicy {
    /// With every group commit: a flush that has ended can't be taken back.
    EveryCommit,
    /// With every checkpoint, at the start and at the end: what came since can be taken back while
    /// no one remembers it.
    Checkpoints,
}

/// What a store advances. Calls block, for a bounded time, and come from one thread at a time.
pub trait Anchor: Debug + Send + Sync {
    /// The state that it was advanced to last; None: never.
    fn latest(&self) -> io::Result<Option<Anchored>>;
    /// Advances it, by compare-and-set of the number. Again with the state that it has: no change.
    fn advance(&self, to: &Anchored) -> Result<(), AnchorError>;
    /// The number that the first state must follow, where nothing was kept: numbers up to it were
    /// those of others.
    fn base(&self) -> u64 {
        0
    }
    /// When to advance it.
    fn policy(&self) -> AnchorPolicy;
    /// Whether somebody who may say so believes what is found, of a store that was anchored and of
    /// which this anchor knows nothing.
    fn is_believed(&self) -> bool {
        false
    }
}

/// An anchor in memory, for tests.
#[derive(Debug)]
pub struct MemoryAnchor {
    policy: AnchorPolicy,
    base: u64,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    latest: Option<Anchored>,
    /// Next advances that aren't answered: whether they are made.
    faults: Vec<bool>,
}

impl MemoryAnchor {
    /// One that was never advanced.
    #[must_use]
    pub fn new(policy: AnchorPolicy) -> Self {
        Self { policy, base: 0, kept: Mutex::default() }
    }

    /// The same, of which numbers up to `base` are taken.
    #[must_use]
    pub fn above(policy: AnchorPolicy, base: u64) -> Self {
        Self { base, ..Self::new(policy) }
    }

    /// Forgets what it was advanced to, as whoever may write to it can have it do. Its number stays
    /// taken.
    #[must_use]
    pub fn forgotten(&self) -> Self {
        let last = self.kept().latest.map_or(self.base, |latest| latest.number);
        Self::above(self.policy, last)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the next advance without an answer, made or not.
    pub fn fail_next(&self, is_made: bool) {
        self.kept().faults.push(is_made);
    }

    /// Answers again, whatever was to fail.
    pub fn recover(&self) {
        self.kept().faults.clear();
    }

    /// Another one that stands where this one does, as who takes a machine's state for later has it.
    #[must_use]
    pub fn copy(&self) -> Self {
        let kept = Kept { latest: self.kept().latest, faults: Vec::new() };
        Self { policy: self.policy, base: self.base, kept: Mutex::new(kept) }
    }
}

impl Anchor for MemoryAnchor {
    fn latest(&self) -> io::Result<Option<Anchored>> {
        Ok(self.kept().latest)
    }

    fn advance(&self, to: &Anchored) -> Result<(), AnchorError> {
        let mut kept = self.kept();
        let fault = kept.faults.pop();
        if fault.unwrap_or(true) && kept.latest != Some(*to) {
            let number = kept.latest.map_or(self.base, |latest| latest.number);
            if to.number != number + 1 {
                let detail = format!("it has number {number}, not the one before {}", to.number);
                return Err(AnchorError::Lost(detail));
            }
            kept.latest = Some(*to);
        }
        match fault {
            None => Ok(()),
            Some(_) => Err(AnchorError::Unreachable("no answer".into())),
        }
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn policy(&self) -> AnchorPolicy {
        self.policy
    }
}
