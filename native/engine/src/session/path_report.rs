//! What is known of each path of a session, for whoever operates it.

use std::net::SocketAddr;

use sealane_proto::session::{PathAccount, Session};

/// One path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathReport {
    /// Where this end is bound.
    pub local_address: SocketAddr,
    /// Where its packets go.
    pub peer_address: SocketAddr,
    /// Its packets.
    pub account: PathAccount,
}

impl PathReport {
    /// Of each path of a session, whose addresses (own, peer's) come in the same order.
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
