//! Report about each path of a session, for operators.

use std::net::SocketAddr;

use sealane_proto::session::{PathAccount, Session};

use super::lanes::Lanes;
use super::wire::WireAddress;

/// One path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathReport {
    /// Local address.
    pub local_address: WireAddress,
    /// Destination of its packets.
    pub peer_address: SocketAddr,
    /// How often its device failed; 0 for sockets.
    pub failures: u64,
    /// Statistics of its packets.
    pub account: PathAccount,
}

impl PathReport {
    /// Reports on each path of a session; all are in path order.
    pub(super) fn of(
        locals: &[WireAddress],
        lanes: &Lanes,
        session: &Session,
    ) -> impl Iterator<Item = Self> {
        let ends = locals.iter().zip(lanes.peers()).zip(lanes.failures());
        let paths = ends.zip(session.path_accounts());
        paths.map(|(((local_address, peer_address), failures), account)| Self {
            local_address: *local_address,
            peer_address,
            failures,
            account,
        })
    }
}
