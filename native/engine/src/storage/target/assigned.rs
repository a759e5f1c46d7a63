//! A namespace as attached to one controller.

use std::sync::Arc;

use sealane_proto::nvme::operation::{Access, CommandSet, NamespaceFormat};
use sealane_proto::nvme::status::Status;

use super::namespace::Namespace;

/// Asymmetric namespace access state of a namespace at a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnaState {
    /// Use this path.
    Optimized,
    /// Use this path if there is no better one.
    NonOptimized,
    /// Currently not accessible through this controller.
    Inaccessible,
    /// Never again accessible through this controller.
    PersistentLoss,
    /// The state is changing; the host should retry.
    Change,
}

impl AnaState {
    fn access(self) -> Access {
        match self {
            Self::Optimized | Self::NonOptimized => Access::Full,
            Self::Inaccessible => Access::Refused(Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Access::Refused(Status::ANA_PERSISTENT_LOSS),
            Self::Change => Access::Refused(Status::ANA_TRANSITION),
        }
    }
}

/// A namespace attached to a controller.
#[derive(Debug, Clone)]
pub struct Assigned {
    /// Its id at the controller.
    pub nsid: u32,
    /// The namespace.
    pub namespace: Arc<Namespace>,
    /// Its ANA state at the controller.
    pub state: AnaState,
    /// Whether the controller's host may only read it.
    pub is_read_only: bool,
}

impl Assigned {
    /// Its format for the controller's queues.
    #[must_use]
    pub fn format(&self) -> NamespaceFormat {
        let verify = CommandSet::VERIFY;
        let common = verify.with(CommandSet::WRITE_ZEROES).with(CommandSet::DEALLOCATE);
        let commands = match (self.namespace.is_sealed, self.namespace.is_fresh) {
            // No deallocation: a deallocated sector couldn't be distinguished from a lost one.
            (true, false) => verify.with(CommandSet::WRITE_IF),
            (true, true) => common.with(CommandSet::WRITE_IF),
            (false, _) => common
                .with(CommandSet::COMPARE)
                .with(CommandSet::FUSED)
                .with(CommandSet::RESERVATIONS),
        };
        NamespaceFormat {
            nsid: self.nsid,
            block_bytes: self.namespace.block_bytes,
            block_count: self.namespace.block_count(),
            commands,
            access: match self.state.access() {
                Access::Full if self.is_read_only => Access::ReadOnly,
                access => access,
            },
        }
    }
}
