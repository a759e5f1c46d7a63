//! Report about each path of a session, for operators.

use std::net::SocketAddr;

use sealane_proto::session::{PathAccount, Session};

/// One path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathReport {
    /// Local address.
    pub local_address: SocketAddr,
    /// Destination of its packets.
    pub peer_address: SocketAddr,
    /// Statistics of its packets.
    pub account: PathAccount,
}

impl PathReport {
    /// Reports on each path of a session; `addresses` (local, peer) are in path order.
    pub(super) fn of(
        addresses: impl Iterator<Item = (SocketAddr, SocketAddr)>,
        session: &Session,
    ) -> impl Iterator<Item = Self> {
        let paths = addresses.zip(session.path_accounts());
        paths.map(|((local_address, peer_address), account)| Self {
            local_address,
            peer_address,
            account,
        })
    }
}
