//! What an end tells the other about its queue pair, as text.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A number of 24 bits, the width of queue pair numbers and packet sequence numbers.
const BITS_24: u32 = (1 << 24) - 1;
/// Numbers of queue pairs: 0 and 1 belong to the subnet's management, the last is multicast.
const QUEUE_PAIRS: std::ops::Range<u32> = 2..BITS_24;
/// The MTUs of InfiniBand, in bytes.
const MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];

/// Address of a queue pair: `verbs:10.0.0.1,qpn=17,psn=4660,mtu=4096`, with `,rkey=99` if peers write
/// to its ring instead of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairAddress {
    /// IP address from which the port's GID is made (RoCE v2).
    pub ip: IpAddr,
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// Number of the first packet that it sends, 24 bits.
    pub first_psn: u32,
    /// Largest packet that its port takes, in bytes.
    pub mtu_bytes: u16,
    /// Key of the ring to which packets are written; none if they are sent.
    pub rkey: Option<u32>,
}

/// A text that is not the address of a queue pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a queue pair's address: {0:?}")]
pub struct ParseError(pub String);

impl fmt::Display for QueuePairAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ip, number, first_psn, mtu_bytes, rkey } = self;
        write!(formatter, "verbs:{ip},qpn={number},psn={first_psn},mtu={mtu_bytes}")?;
        rkey.map_or(Ok(()), |rkey| write!(formatter, ",rkey={rkey}"))
    }
}

impl FromStr for QueuePairAddress {
    type Err = ParseError;

    /// Accepts only what `Display` writes.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parse = || {
            let mut parts = text.strip_prefix("verbs:")?.split(',');
            let ip = parts.next()?.parse().ok()?;
            let mut number = |name: &str| -> Option<u32> {
                parts.next()?.strip_prefix(name)?.strip_prefix('=')?.parse().ok()
            };
            let found = Self {
                ip,
                number: number("qpn")?,
                first_psn: number("psn")?,
                mtu_bytes: u16::try_from(number("mtu")?).ok()?,
                rkey: number("rkey"),
            };
            let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
            let is_possible = QUEUE_PAIRS.contains(&found.number)
                && found.first_psn <= BITS_24
                && MTUS.contains(&found.mtu_bytes)
                && !ip.is_unspecified()
                && !ip.is_multicast()
                && !is_broadcast;
            // Also refuses signs, leading zeros and further parts.
            (is_possible && found.to_string() == text).then_some(found)
        };
        parse().ok_or_else(|| ParseError(text.chars().take(80).collect()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(ip: IpAddr, number in QUEUE_PAIRS, first_psn in 0..=BITS_24,
                                   mtu in 0..MTUS.len(), rkey: Option<u32>) {
            prop_assume!(!ip.is_unspecified() && !ip.is_multicast());
            prop_assume!(ip != IpAddr::V4(std::net::Ipv4Addr::BROADCAST));
            let address = QueuePairAddress { ip, number, first_psn, mtu_bytes: MTUS[mtu], rkey };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn any_text_is_refused_or_written_again(text in ".*|verbs:[0-9.:a-f]*,qpn=[-+0-9]*,psn=[0-9]*,mtu=(2048|[0-9]*).*") {
            if let Ok(address) = text.parse::<QueuePairAddress>() {
                prop_assert_eq!(address.to_string(), text);
            }
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let good = "verbs:10.0.0.1,qpn=17,psn=4660,mtu=4096";
        assert!(good.parse::<QueuePairAddress>().is_ok());
        for (from, to) in [
            ("17", "16777216"),
            ("17", "16777215"),
            ("17", "1"),
            ("10.0.0.1", "255.255.255.255"),
            ("17", "+17"),
            ("17", "017"),
            ("4660", "16777216"),
            ("4660", "-1"),
            ("4096", "4095"),
            ("4096", "8192"),
            ("4096", "65537"),
            ("4096", "4096,"),
            ("4096", "4096,rkey=4294967296"),
            ("4096", "4096,rkey=01"),
            ("4096", "4096,rkey=1,rkey=1"),
            ("4096", "4096,key=1"),
            ("verbs:", ""),
            ("10.0.0.1", "0.0.0.0"),
            ("10.0.0.1", "224.0.0.1"),
            ("10.0.0.1", "ff02::1"),
            ("10.0.0.1", "host"),
            (",psn=4660", ""),
            ("psn", "qpn"),
        ] {
            let bad = good.replace(from, to);
            assert_eq!(bad.parse::<QueuePairAddress>(), Err(ParseError(bad.clone())), "{bad}");
        }
    }
}
