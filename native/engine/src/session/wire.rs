//! What carries a path's packets: UDP datagrams, or messages of a verbs queue pair. Both lose and
//! reorder them, and neither is trusted.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use sealane_verbs::{Mode, QueuePair, QueuePairAddress, ROCE_PORT, Unavailable};

use crate::udp::Udp;

/// Where one end of a path sends from and receives at, as the peer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireAddress {
    /// A UDP socket, with a port other than 0: `10.0.0.1:4433`.
    Udp(SocketAddr),
    /// A queue pair: `verbs:10.0.0.1,qpn=17,psn=4660,mtu=4096`.
    Verbs(QueuePairAddress),
}

impl WireAddress {
    /// Name of the wire, as operators configure it.
    #[must_use]
    pub fn wire(&self) -> &'static str {
        match self {
            Self::Udp(_) => "udp",
            Self::Verbs(_) => "verbs",
        }
    }

    /// Address and UDP port of its packets; RoCE v2 has a port for all queue pairs.
    #[must_use]
    pub fn network_address(&self) -> SocketAddr {
        match self {
            Self::Udp(address) => *address,
            Self::Verbs(pair) => SocketAddr::new(pair.ip, ROCE_PORT),
        }
    }
}

impl fmt::Display for WireAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(address) => address.fmt(formatter),
            Self::Verbs(address) => address.fmt(formatter),
        }
    }
}

/// A text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a numeric address with a port nor one of a queue pair")]
pub struct ParseError(String);

impl FromStr for WireAddress {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let udp = || {
            let address: SocketAddr = text.parse().ok()?;
            // A scope (`%2`) means something on this machine only.
            (address.port() != 0 && !text.contains('%')).then_some(Self::Udp(address))
        };
        let verbs = || text.parse().map(Self::Verbs).ok();
        udp().or_else(verbs).ok_or_else(|| ParseError(text.chars().take(80).collect()))
    }
}

/// What an endpoint is to bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bind {
    /// A UDP socket; port 0 selects a free port.
    Udp(SocketAddr),
    /// A queue pair at the device that has this address, written `verbs:10.0.0.1`, or with
    /// `,write` if peers are to write to its ring.
    Verbs(IpAddr, Mode),
}

impl FromStr for Bind {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parsed = match text.strip_prefix("verbs:") {
            Some(rest) => {
                let (address, mode) = match rest.strip_suffix(",write") {
                    Some(address) => (address, Mode::Write),
                    None => (rest, Mode::Send),
                };
                address.parse().ok().map(|address| Self::Verbs(address, mode))
            }
            None => text.parse().ok().map(Self::Udp),
        };
        parsed.ok_or_else(|| ParseError(text.into()))
    }
}

/// One end of a path.
#[derive(Debug)]
pub(super) enum Wire {
    Udp(Box<Udp>),
    Verbs(Box<QueuePair>),
}

impl Wire {
    /// Binds a socket or makes a queue pair.
    pub(super) fn bind(to: Bind) -> Result<Self, Refused> {
        Ok(match to {
            Bind::Udp(address) => Self::Udp(Box::new(Udp::bind(address)?)),
            Bind::Verbs(address, mode) => Self::Verbs(Box::new(QueuePair::new(address, mode)?)),
        })
    }

    /// Bytes of memory that the device may use, and that the kernel can't move.
    pub(super) fn pinned_bytes(&self) -> usize {
        match self {
            Self::Udp(_) => 0,
            Self::Verbs(pair) => pair.pinned_bytes(),
        }
    }

    pub(super) fn local_address(&self) -> io::Result<WireAddress> {
        Ok(match self {
            Self::Udp(udp) => WireAddress::Udp(udp.local_address()?),
            Self::Verbs(pair) => WireAddress::Verbs(pair.local()),
        })
    }
}

/// Both ends of a path.
#[derive(Debug)]
pub(super) enum Ends {
    Udp(Box<Udp>, SocketAddr),
    Verbs(Box<QueuePair>, QueuePairAddress),
}

impl Ends {
    pub(super) fn local_address(&self) -> io::Result<WireAddress> {
        Ok(match self {
            Self::Udp(udp, _) => WireAddress::Udp(udp.local_address()?),
            Self::Verbs(pair, _) => WireAddress::Verbs(pair.local()),
        })
    }

    pub(super) fn pinned_bytes(&self) -> usize {
        match self {
            Self::Udp(..) => 0,
            Self::Verbs(pair, _) => pair.pinned_bytes(),
        }
    }

    pub(super) fn into_udp(self) -> Option<(Udp, SocketAddr)> {
        match self {
            Self::Udp(udp, peer) => Some((*udp, peer)),
            Self::Verbs(..) => None,
        }
    }
}

/// Pairs each peer address with the next local end of its kind. Fails with the peer address for
/// which none is left.
pub(super) fn pair(mut wires: Vec<Wire>, peers: &[WireAddress]) -> Result<Vec<Ends>, WireAddress> {
    peers
        .iter()
        .map(|peer| {
            let is_of_kind = |wire: &Wire| match peer {
                WireAddress::Udp(_) => matches!(wire, Wire::Udp(_)),
                WireAddress::Verbs(_) => matches!(wire, Wire::Verbs(_)),
            };
            let next = wires.iter().position(is_of_kind).map(|index| wires.remove(index));
            match (next, peer) {
                (Some(Wire::Udp(udp)), WireAddress::Udp(peer)) => Ok(Ends::Udp(udp, *peer)),
                (Some(Wire::Verbs(pair)), WireAddress::Verbs(peer)) => Ok(Ends::Verbs(pair, *peer)),
                _ => Err(*peer),
            }
        })
        .collect()
}

/// Why an end of a path could not be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// No socket; a session without it is none.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// No queue pair; a session may use others.
    #[error(transparent)]
    QueuePair(#[from] Unavailable),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["10.0.0.1:80", "[::1]:80", "verbs:10.0.0.1,qpn=17,psn=4660,mtu=4096"] {
            assert_eq!(text.parse::<WireAddress>().unwrap().to_string(), text);
        }
        for text in [
            "10.0.0.1",
            "verbs:",
            "",
            "host:80",
            "verbs:10.0.0.1:80",
            "10.0.0.1:0",
            "[fe80::1%0]:80",
        ] {
            assert!(text.parse::<WireAddress>().is_err(), "{text}");
        }
        let verbs: WireAddress = "verbs:10.0.0.1,qpn=17,psn=4660,mtu=4096".parse().unwrap();
        assert_eq!(verbs.network_address(), "10.0.0.1:4791".parse().unwrap());
        let ip = "10.0.0.1".parse().unwrap();
        assert_eq!("verbs:10.0.0.1".parse(), Ok(Bind::Verbs(ip, Mode::Send)));
        assert_eq!("verbs:10.0.0.1,write".parse(), Ok(Bind::Verbs(ip, Mode::Write)));
        assert_eq!("10.0.0.1:0".parse(), Ok(Bind::Udp("10.0.0.1:0".parse().unwrap())));
        assert!("verbs:10.0.0.1:0".parse::<Bind>().is_err());
        assert!("10.0.0.1".parse::<Bind>().is_err());
    }
}
