//! Anchors: a small memory that no adversary can roll back, in which a store records its last
//! durable state.

use std::fmt::Debug;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::codec::{get, get_u64};
use super::keys::{TAG_BYTES, Tag};

/// Bytes of an anchored state.
pub const ANCHORED_BYTES: usize = 1 + 4 * 8 + 2 * TAG_BYTES;
/// First byte of an anchored state.
const VERSION: u8 = 1;

/// A store's last durable state, as its anchor records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchored {
    /// Number of the record: grows by one with each advance.
    pub number: u64,
    /// Epoch of the opening.
    pub epoch: u64,
    /// Number of the checkpoint from which the log continues.
    pub checkpoint: u64,
    /// Its tag.
    pub checkpoint_tag: Tag,
    /// Log pages before this one are flushed.
    pub log_flushed: u64,
    /// Tag of the last flushed log page.
    pub log_tag: Tag,
}

impl Anchored {
    /// Encodes the record for whoever stores it.
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

    /// Parses a record that was stored under `number`; `None` if it is malformed or has another
    /// number.
    #[must_use]
    pub fn decode_as(number: u64, bytes: &[u8]) -> Option<Self> {
        Self::decode(bytes).filter(|found| found.number == number)
    }

    /// Parses a record; `None` if it is malformed.
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
    /// No answer in time: it is unknown whether the anchor was advanced. The same record is tried
    /// again.
    #[error("the anchor can't be reached: {0}")]
    Unreachable(String),
    /// Another record has that number: somebody else is using this store.
    #[error("the anchor was advanced by somebody else: {0}")]
    Lost(String),
}

/// When an anchor is advanced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorPolicy {
    /// With every group commit: completed flushes can't be rolled back.
    EveryCommit,
    /// With every checkpoint, and at the start and end of an opening: later changes can be rolled
    /// back unnoticed.
    Checkpoints,
}

/// The anchor of one store. Calls block, for a bounded time, and come from one thread at a time.
pub trait Anchor: Debug + Send + Sync {
    /// The last record; `None` if it was never advanced.
    fn latest(&self) -> io::Result<Option<Anchored>>;
    /// Advances the anchor by compare-and-set of the number. Idempotent.
    fn advance(&self, to: &Anchored) -> Result<(), AnchorError>;
    /// The number that the first record must follow, if there is none: numbers up to this one are
    /// used.
    fn base(&self) -> u64 {
        0
    }
    /// When the store must advance it.
    fn policy(&self) -> AnchorPolicy;
    /// Whether somebody authorised accepts the state of the store as found, although it was
    /// anchored and this anchor has no record of it.
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
    /// Advances that won't be answered, and whether each takes effect.
    faults: Vec<bool>,
}

impl MemoryAnchor {
    /// An anchor that was never advanced.
    #[must_use]
    pub fn new(policy: AnchorPolicy) -> Self {
        Self { policy, base: 0, kept: Mutex::default() }
    }

    /// An anchor that was never advanced, with numbers up to `base` used.
    #[must_use]
    pub fn above(policy: AnchorPolicy, base: u64) -> Self {
        Self { base, ..Self::new(policy) }
    }

    /// The anchor after its record was deleted, as anybody with write access to it can do. Its
    /// number stays used.
    #[must_use]
    pub fn forgotten(&self) -> Self {
        let last = self.kept().latest.map_or(self.base, |latest| latest.number);
        Self::above(self.policy, last)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the next advance unanswered; `is_made` says whether it takes effect.
    pub fn fail_next(&self, is_made: bool) {
        self.kept().faults.push(is_made);
    }

    /// Cancels the faults of [`Self::fail_next`].
    pub fn recover(&self) {
        self.kept().faults.clear();
    }

    /// A copy of the anchor, as made by somebody who saves a machine's state for later.
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
