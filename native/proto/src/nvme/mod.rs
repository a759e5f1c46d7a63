//! NVMe/TCP: PDU codecs, command and completion entries, and the I/O queues' state machines for
//! both sides.
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
    /// A command's MAC isn't valid for its number on this queue.
    CommandMac,
    /// A sector's MAC isn't valid for its command, LBA and direction.
    SectorMac,
    /// A completion's MAC isn't valid for its command and outcome.
    CompletionMac,
    /// The stored sector isn't the latest one written.
    SectorStale,
    /// The sector's tag doesn't authenticate it.
    SectorTag,
    /// The sector names a key epoch that isn't the volume's.
    SectorKeyEpoch,
    /// The sector's format version or flags are unknown.
    SectorFormat,
    /// A sector is reported as unwritten in a fully sealed volume.
    SectorUnwritten,
    /// A PDU breaks the transport's rules.
    PduMalformed,
    /// The peer closed the connection or ended it with a termination request.
    QueueClosed,
    /// The store failed to read or write.
    StoreFailed,
    /// A page that the store's next opening needs isn't the latest one written.
    StoreDamaged,
    /// The store was rolled back to an older state, or isn't the one that its anchor records.
    StoreRolledBack,
    /// The store's anchor didn't answer: the flush or durable write may be tried again.
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
