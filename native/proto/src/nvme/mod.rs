//! NVMe/TCP: PDU codecs, command and completion entries, and the I/O queue machines of both sides.
//!
//! NVMe Base 2.0, NVM Command Set 1.0, NVMe/TCP Transport 1.0.

pub mod command;
mod controller_check;
pub mod controller_queue;
pub mod host_command;
pub mod host_queue;
pub mod operation;
pub mod outcomes;
pub mod pdu;
pub mod reader;
pub mod slots;
pub mod status;
pub mod transmit;

/// Why a queue or a sector was refused: stable ids, listed in `docs/formats/secure-queue.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A command's MAC doesn't belong to this command number on this queue.
    CommandMac,
    /// A sector's MAC doesn't belong to this command, place and direction.
    SectorMac,
    /// A completion's MAC doesn't belong to this command and outcome.
    CompletionMac,
    /// The stored sector isn't the one written last.
    SectorStale,
    /// The sector doesn't open under its tag.
    SectorTag,
    /// The sector names a key epoch that isn't the volume's.
    SectorKeyEpoch,
    /// The sector's format version or flags are not known.
    SectorFormat,
    /// A sector is said to be unwritten in a volume that has none such.
    SectorUnwritten,
    /// A PDU breaks the transport's rules.
    PduMalformed,
    /// The peer closed the connection or ended it with a termination request.
    QueueClosed,
    /// The store failed to read or write.
    StoreFailed,
    /// A page that the store's next opening needs isn't the one written last.
    StoreDamaged,
    /// The store was put back to an older state, or is another's.
    StoreRolledBack,
    /// The store's anchor gave no answer: what was to be made durable may be tried again.
    AnchorUnreachable,
    /// No counters left: nothing may be sealed.
    LeaseExhausted,
    /// The back end answered with an error status.
    BackEndStatus,
}

impl Reason {
    /// The stable id.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::CommandMac => "command.mac",
            Self::SectorMac => "sector.mac",
            Self::CompletionMac => "completion.mac",
            Self::SectorStale => "sector.stale",
            Self::SectorTag => "sector.tag",
            Self::SectorKeyEpoch => "sector.key_epoch",
            Self::SectorFormat => "sector.format",
            Self::SectorUnwritten => "sector.unwritten",
            Self::PduMalformed => "pdu.malformed",
            Self::QueueClosed => "queue.closed",
            Self::StoreFailed => "store.failed",
            Self::StoreDamaged => "store.damaged",
            Self::StoreRolledBack => "store.rolled_back",
            Self::AnchorUnreachable => "anchor.unreachable",
            Self::LeaseExhausted => "lease.exhausted",
            Self::BackEndStatus => "backend.status",
        }
    }
}
