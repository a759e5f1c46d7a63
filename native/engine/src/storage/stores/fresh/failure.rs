//! Why a store refuses, as a reason that travels inside an `io::Error`.

use std::io;

use sealane_proto::nvme::Reason;

/// A refusal of a store that keeps freshness.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// What the device holds for a block isn't what was written last.
    #[error("block {0} isn't what was written last")]
    Stale(u64),
    /// A leaf page isn't the one that was written last.
    #[error("leaf page {0} isn't what was written last")]
    StaleLeaf(u64),
    /// The leaf page that knew the block was wrong when it was to be changed.
    #[error("nobody knows what block {0} is, as its leaf page was wrong: write it again")]
    Orphaned(u64),
    /// A page that the next opening needs isn't the one that was written last.
    #[error("it isn't what was written last")]
    Damaged,
    /// The device was put back to an older state, or is another's.
    #[error("the store was rolled back: {0}")]
    RolledBack(String),
    /// The anchor gave no answer: nothing is lost, and the next flush tries again.
    #[error("the anchor can't be reached: {0}")]
    AnchorUnreachable(String),
    /// Nobody knows what the device has: the store must be opened anew.
    #[error("the store failed earlier and must be opened anew: {0}")]
    Failed(String),
}

impl Refusal {
    /// Its stable reason.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::Stale(_) | Self::StaleLeaf(_) | Self::Orphaned(_) => Reason::SectorStale,
            Self::Damaged => Reason::StoreDamaged,
            Self::RolledBack(_) => Reason::StoreRolledBack,
            Self::AnchorUnreachable(_) => Reason::AnchorUnreachable,
            Self::Failed(_) => Reason::StoreFailed,
        }
    }

    /// The refusal in an error, if there is one.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref().and_then(|inner| inner.downcast_ref())
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        let kind = match refusal {
            Refusal::AnchorUnreachable(_) => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, refusal)
    }
}

/// The reason of a store's error.
#[must_use]
pub fn reason_of(error: &io::Error) -> Reason {
    Refusal::of(error).map_or(Reason::StoreFailed, Refusal::reason)
}

/// The same error once more, for everybody who waits for what failed.
#[must_use]
pub fn copy_error(error: &io::Error) -> io::Error {
    match Refusal::of(error) {
        Some(refusal) => refusal.clone().into(),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

/// What the device holds can't be what an honest device holds after a power cut.
pub(super) fn damaged(detail: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged store: {}", detail.into()))
}
