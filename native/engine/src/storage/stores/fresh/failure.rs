//! Reasons for which a store refuses operations, carried in an `io::Error`.

use std::io;

use sealane_proto::nvme::Reason;

/// A refusal of a store that keeps freshness.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The block on the device isn't the version written last.
    #[error("block {0} isn't the version written last")]
    Stale(u64),
    /// A leaf page isn't the version written last.
    #[error("leaf page {0} isn't the version written last")]
    StaleLeaf(u64),
    /// The block's leaf page was wrong when a merge had to change it.
    #[error("the version of block {0} is unknown, as its leaf page was wrong: write it again")]
    Orphaned(u64),
    /// A page that the next opening needs isn't the version written last.
    #[error("it isn't the version written last")]
    Damaged,
    /// The device was rolled back to an older state, or belongs to another store.
    #[error("the store was rolled back: {0}")]
    RolledBack(String),
    /// The anchor did not answer: nothing is lost, and the next flush tries again.
    #[error("the anchor can't be reached: {0}")]
    AnchorUnreachable(String),
    /// The state of the device is unknown: the store must be opened again.
    #[error("the store failed earlier and must be opened again: {0}")]
    Failed(String),
}

impl Refusal {
    /// Its stable reason id.
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

    /// The refusal in an error, if any.
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

/// The reason id of a store's error.
#[must_use]
pub fn reason_of(error: &io::Error) -> Reason {
    Refusal::of(error).map_or(Reason::StoreFailed, Refusal::reason)
}

/// Copies an error, so that everybody who waits for the failed operation gets one.
#[must_use]
pub fn copy_error(error: &io::Error) -> io::Error {
    match Refusal::of(error) {
        Some(refusal) => refusal.clone().into(),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

/// The error of a device that holds what no honest device can hold after a power cut.
pub(super) fn damaged(detail: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged store: {}", detail.into()))
}
