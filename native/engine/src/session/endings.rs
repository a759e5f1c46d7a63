//! Why a session ended: the stable ids for job and operator, and the code for the peer.

use sealane_proto::session::CloseReason;

use crate::permit;

/// The job's process has ended.
pub(super) const REASON_JOB_GONE: &str = "session.job.gone";

/// There was not enough memory for the session.
pub(super) const REASON_RESOURCES: &str = "session.endpoint.resources";

/// The daemon ended the session because the peer may no longer act.
const REASON_PEER_REVOKED: &str = "session.peer.revoked";

/// The daemon ended the session because this end may no longer act.
const REASON_BARRED: &str = "session.closed.barred";

/// The close reason for a session whose permit ended with `reason`.
pub(super) fn of_permit(reason: &str) -> &'static str {
    match reason {
        "node.revoked" => REASON_PEER_REVOKED,
        permit::STALE => "session.trust.ended",
        _ => "session.peer.refused",
    }
}

/// The close code sent to the peer for the daemon's reason.
pub(super) fn close_code(reason: &str, is_draining: bool) -> CloseReason {
    match reason {
        REASON_PEER_REVOKED => CloseReason::Revoked,
        REASON_BARRED => CloseReason::Barred,
        _ if is_draining => CloseReason::Draining,
        _ => CloseReason::Requested,
    }
}

/// The reason id for a close reason of the session machine.
pub(super) fn reason_of(reason: CloseReason, by_peer: bool) -> String {
    let (here, there) = match reason {
        CloseReason::Requested => ("session.closed.requested", "session.peer_closed.requested"),
        CloseReason::IdleTimeout => {
            ("session.closed.idle_timeout", "session.peer_closed.idle_timeout")
        }
        CloseReason::PacketLimit => {
            ("session.closed.packet_limit", "session.peer_closed.packet_limit")
        }
        CloseReason::ForgeryLimit => {
            ("session.closed.forgery_limit", "session.peer_closed.forgery_limit")
        }
        CloseReason::Revoked => ("session.closed.revoked", "session.peer_closed.revoked"),
        CloseReason::PathOverloaded => {
            ("session.closed.path_overloaded", "session.peer_closed.path_overloaded")
        }
        CloseReason::PathMtu => ("session.closed.path_mtu", "session.peer_closed.path_mtu"),
        CloseReason::Draining => ("session.closed.draining", "session.peer_closed.draining"),
        CloseReason::Barred => (REASON_BARRED, "session.peer_closed.barred"),
        CloseReason::Other(_) => ("session.closed.unknown", "session.peer_closed.unknown"),
    };
    String::from(if by_peer { there } else { here })
}
