//! How a link treats an IP packet: destination, path choice for its flow, congestion marks and bit
//! errors. IPv4 (RFC 791), and IPv6 (RFC 8200) without extension headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Protocol number of TCP (RFC 9293).
const TCP: u8 = 6;
/// Protocol number of UDP (RFC 768).
const UDP: u8 = 17;

/// ECN field of an ECN-capable packet (RFC 3168) …
const ECT0: u8 = 2;
/// … and of one that met congestion; also the field's mask.
const CE: u8 = 3;

/// The header fields that forwarding uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpPacket {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Protocol number, or IPv6 next header.
    pub protocol: u8,
    /// Source and destination port for TCP and UDP; none for fragments and other protocols.
    pub ports: Option<(u16, u16)>,
    /// ECT(0), ECT(1) or CE (RFC 3168): the packet may be marked instead of dropped.
    pub is_ecn_capable: bool,
    header_bytes: usize,
}

impl IpPacket {
    /// Parses a packet's header; `None` if the packet is incomplete or malformed.
    #[must_use]
    pub fn parse(packet: &[u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => Self::parse_v4(packet),
            6 => Self::parse_v6(packet),
            _ => None,
        }
    }

    fn parse_v4(packet: &[u8]) -> Option<Self> {
        let header: &[u8; 20] = packet.first_chunk()?;
        let header_bytes = usize::from(header[0] & 15) * 4;
        let total_bytes = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if header_bytes < 20 || total_bytes < header_bytes || total_bytes > packet.len() {
            return None;
        }
        // "More fragments" or an offset: only the first fragment has the ports.
        let is_fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3FFF != 0;
        let body = packet.get(header_bytes..total_bytes)?;
        let address = |at: usize| -> Option<IpAddr> {
            let bytes: [u8; 4] = header.get(at..at + 4)?.try_into().ok()?;
            Some(Ipv4Addr::from(bytes).into())
        };
        Some(Self {
            source: address(12)?,
            destination: address(16)?,
            protocol: header[9],
            ports: if is_fragment { None } else { ports(header[9], body) },
            is_ecn_capable: header[1] & 3 != 0,
            header_bytes,
        })
    }

    fn parse_v6(packet: &[u8]) -> Option<Self> {
        let header: &[u8; 40] = packet.first_chunk()?;
        let body_bytes = usize::from(u16::from_be_bytes([header[4], header[5]]));
        let body = packet.get(40..40 + body_bytes)?;
        let address = |at: usize| -> Option<IpAddr> {
            let bytes: [u8; 16] = header.get(at..at + 16)?.try_into().ok()?;
            Some(Ipv6Addr::from(bytes).into())
        };
        Some(Self {
            source: address(8)?,
            destination: address(24)?,
            protocol: header[6],
            ports: ports(header[6], body),
            is_ecn_capable: header[1] & 0x30 != 0,
            header_bytes: 40,
        })
    }

    /// A hash of the 5-tuple, equal for all packets of a flow.
    #[must_use]
    pub fn flow_hash(&self, salt: u64) -> u64 {
        flow_hash((self.source, self.destination), self.ports, self.protocol, salt)
    }

    /// Sets "congestion experienced" in the packet that this was parsed from, and updates the IPv4
    /// checksum.
    pub fn mark(&self, packet: &mut [u8]) {
        self.change_ecn(packet, |ecn| ecn | CE);
    }

    /// Changes "congestion experienced" to ECT(0), as a network does that erases marks, and updates
    /// the IPv4 checksum.
    pub fn erase_mark(&self, packet: &mut [u8]) {
        self.change_ecn(packet, |ecn| if ecn == CE { ECT0 } else { ecn });
    }

    fn change_ecn(&self, packet: &mut [u8], change: impl FnOnce(u8) -> u8) {
        match (self.source, packet) {
            (IpAddr::V4(_), packet @ [_, _, ..]) if packet.len() >= 20 => {
                let before = [packet[0], packet[1]];
                packet[1] = packet[1] & !CE | change(packet[1] & CE);
                let after = [packet[0], packet[1]];
                update_checksum(packet, 10, before, after);
            }
            (IpAddr::V6(_), [_, class, ..]) => {
                *class = *class & !(CE << 4) | change(*class >> 4 & CE) << 4;
            }
            _ => {}
        }
    }

    /// Flips the bit after the IP header that `chance` selects. With `passes_checksum` it is a bit
    /// of a TCP or UDP payload, and the checksum is updated, as by a middlebox with faulty memory:
    /// only the receiving program can notice.
    pub fn corrupt(&self, packet: &mut [u8], chance: u64, passes_checksum: bool) {
        let transport = self.transport(packet).filter(|_| passes_checksum);
        let body = transport.map_or(self.header_bytes, |transport| transport.payload_at);
        let Some(bits) = packet.len().checked_sub(body).filter(|bytes| *bytes > 0) else { return };
        let bit = ((u128::from(chance) * (bits as u128 * 8)) >> 64) as usize;
        let at = body + bit / 8;
        // Checksum words start at the transport header; the last one may be half a word.
        let word = at - (at - self.header_bytes) % 2;
        let word_at = |packet: &[u8]| [packet[word], packet.get(word + 1).copied().unwrap_or(0)];
        let before = word_at(packet);
        packet[at] ^= 1 << (bit % 8);
        let after = word_at(packet);
        if let Some(checksum_at) = transport.and_then(|transport| transport.checksum_at) {
            update_checksum(packet, checksum_at, before, after);
            // A sum of zero is sent in its other form, because zero means "no checksum" (RFC 768).
            if self.protocol == UDP && packet[checksum_at..checksum_at + 2] == [0, 0] {
                packet[checksum_at..checksum_at + 2].fill(0xFF);
            }
        }
    }

    fn transport(&self, packet: &[u8]) -> Option<Transport> {
        self.ports?;
        let header = packet.get(self.header_bytes..)?;
        if self.protocol == UDP {
            let checksum = header.get(6..8)?;
            // Zero means that the sender computed none.
            let checksum_at = (checksum != [0, 0]).then_some(self.header_bytes + 6);
            return Some(Transport { payload_at: self.header_bytes + 8, checksum_at });
        }
        let payload_at = self.header_bytes + usize::from(header.get(12)? >> 4) * 4;
        (header.len() >= 20 && payload_at < packet.len())
            .then_some(Transport { payload_at, checksum_at: Some(self.header_bytes + 16) })
    }
}

/// Offsets in a TCP or UDP packet.
#[derive(Clone, Copy)]
struct Transport {
    payload_at: usize,
    checksum_at: Option<usize>,
}

fn ports(protocol: u8, body: &[u8]) -> Option<(u16, u16)> {
    let [a, b, c, d] = *body.first_chunk()?;
    let port = |high, low| u16::from_be_bytes([high, low]);
    matches!(protocol, TCP | UDP).then_some((port(a, b), port(c, d)))
}

/// A hash of addresses, ports and protocol that selects one of several paths for a flow.
#[must_use]
pub fn flow_hash(
    (source, destination): (IpAddr, IpAddr),
    ports: Option<(u16, u16)>,
    protocol: u8,
    salt: u64,
) -> u64 {
    let bits = |address: IpAddr| match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    };
    let (source_port, destination_port) = ports.unwrap_or_default();
    let ports = u64::from(source_port) << 32 | u64::from(destination_port) << 8;
    let (source, destination) = (bits(source), bits(destination));
    let words = [
        (source >> 64) as u64,
        source as u64,
        (destination >> 64) as u64,
        destination as u64,
        ports | u64::from(protocol),
    ];
    words.into_iter().fold(mix(salt), |hash, word| mix(hash ^ word))
}

/// A bijection in which each output bit depends on all input bits: the finaliser of SplitMix64
/// (Steele, Lea and Flood 2014).
const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// Updates an Internet checksum after one of its words changed (RFC 1624, equation 3).
fn update_checksum(packet: &mut [u8], checksum_at: usize, before: [u8; 2], after: [u8; 2]) {
    let Some(checksum) = packet.get_mut(checksum_at..checksum_at + 2) else { return };
    let old = u16::from_be_bytes([checksum[0], checksum[1]]);
    let mut sum = u32::from(!old)
        + u32::from(!u16::from_be_bytes(before))
        + u32::from(u16::from_be_bytes(after));
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    checksum.copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(bytes: &[u8]) -> u32 {
        let words = bytes.chunks(2).map(|w| [w[0], w.get(1).copied().unwrap_or(0)]);
        words.map(|word| u32::from(u16::from_be_bytes(word))).sum()
    }

    fn checksum(mut sum: u32) -> [u8; 2] {
        while sum > 0xFFFF {
            sum = (sum & 0xFFFF) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    }

    /// A UDP packet over IPv4 with both checksums, as sent by a host.
    fn udp_v4(tos: u8, payload: &[u8]) -> Vec<u8> {
        let udp_bytes = (8 + payload.len()) as u16;
        let mut packet = vec![0x45, tos, 0, 0, 0, 7, 0x40, 0, 64, UDP, 0, 0];
        packet[2..4].copy_from_slice(&(20 + udp_bytes).to_be_bytes());
        packet.extend_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        let header = checksum(sum(&packet));
        packet[10..12].copy_from_slice(&header);
        packet.extend_from_slice(&[0x30, 0x39, 0, 53]);
        packet.extend_from_slice(&udp_bytes.to_be_bytes());
        packet.extend_from_slice(&[0, 0]);
        packet.extend_from_slice(payload);
        let pseudo = sum(&packet[12..20]) + u32::from(UDP) + u32::from(udp_bytes);
        let udp = checksum(pseudo + sum(&packet[20..]));
        packet[26..28].copy_from_slice(if udp == [0, 0] { &[0xFF, 0xFF] } else { &udp });
        packet
    }

    fn is_sound(packet: &[u8]) -> bool {
        let pseudo = sum(&packet[12..20]) + u32::from(packet[9]) + (packet.len() as u32 - 20);
        checksum(sum(&packet[..20])) == [0, 0] && checksum(pseudo + sum(&packet[20..])) == [0, 0]
    }

    #[test]
    fn fields_of_both_versions_are_read() {
        let packet = udp_v4(2, b"hello");
        let header = IpPacket::parse(&packet).unwrap();
        assert_eq!(header.source, "10.0.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(header.destination, "10.0.0.2".parse::<IpAddr>().unwrap());
        assert_eq!((header.protocol, header.ports), (UDP, Some((12_345, 53))));
        assert!(header.is_ecn_capable);
        assert!(!IpPacket::parse(&udp_v4(0, b"")).unwrap().is_ecn_capable);

        let mut packet = vec![0x60, 0x10, 0, 0, 0, 8, TCP, 64];
        packet.extend_from_slice(&[1; 16]);
        packet.extend_from_slice(&[2; 16]);
        packet.extend_from_slice(&[0, 80, 1, 0, 9, 9, 9, 9]);
        let header = IpPacket::parse(&packet).unwrap();
        assert_eq!((header.protocol, header.ports), (TCP, Some((80, 256))));
        assert_eq!(header.destination, IpAddr::from([2_u8; 16]));
        assert!(header.is_ecn_capable);
        header.mark(&mut packet);
        assert_eq!(packet[1], 0x30);
        header.erase_mark(&mut packet);
        assert_eq!(packet[1], 0x20);
    }

    #[test]
    fn fragments_have_no_ports() {
        let mut packet = udp_v4(0, b"hello");
        packet[6] = 0x20;
        assert_eq!(IpPacket::parse(&packet).unwrap().ports, None);
        packet[6..8].copy_from_slice(&[0, 1]);
        assert_eq!(IpPacket::parse(&packet).unwrap().ports, None);
    }

    #[test]
    fn every_truncation_is_refused() {
        let packet = udp_v4(0, b"hello");
        assert!((0..packet.len()).all(|end| IpPacket::parse(&packet[..end]).is_none()));
    }

    #[test]
    fn a_mark_keeps_the_header_checksum() {
        for tos in 0..=255 {
            let mut packet = udp_v4(tos, b"hello");
            let header = IpPacket::parse(&packet).unwrap();
            header.mark(&mut packet);
            assert_eq!(packet[1], tos | 3);
            assert!(is_sound(&packet), "{tos}");
        }
    }

    #[test]
    fn flows_stay_on_their_path_and_spread_over_all() {
        let flow = |port: u16| {
            let mut packet = udp_v4(0, b"x");
            packet[20..22].copy_from_slice(&port.to_be_bytes());
            IpPacket::parse(&packet).unwrap()
        };
        let mut counts = [0; 8];
        for port in 0..8000 {
            let hash = flow(port).flow_hash(5);
            assert_eq!(hash, flow(port).flow_hash(5));
            counts[(hash % 8) as usize] += 1;
        }
        // 1000 each, within five standard deviations.
        assert!(counts.iter().all(|count| (852..1148).contains(count)), "{counts:?}");
        assert_ne!(flow(1).flow_hash(5), flow(1).flow_hash(6));
    }

    #[test]
    fn a_udp_packet_without_checksum_keeps_none() {
        let mut packet = udp_v4(0, b"hello");
        packet[26..28].fill(0);
        IpPacket::parse(&packet).unwrap().corrupt(&mut packet, 1 << 63, true);
        assert_eq!(packet[26..28], [0, 0]);
    }

    #[test]
    fn a_udp_checksum_never_becomes_none() {
        for word in 0..=u16::MAX {
            let before = udp_v4(0, &word.to_be_bytes());
            assert_ne!(before[26..28], [0, 0], "{word}");
            let mut after = before.clone();
            IpPacket::parse(&before).unwrap().corrupt(&mut after, 0, true);
            assert_ne!(after[26..28], [0, 0], "{word}");
            assert!(is_sound(&after), "{word}");
        }
    }

    proptest! {
        #[test]
        fn corruption_flips_one_bit_and_shows_in_the_checksum_or_not(
            payload in proptest::collection::vec(any::<u8>(), 1..40),
            chance: u64,
            passes: bool,
        ) {
            let before = udp_v4(0, &payload);
            let mut after = before.clone();
            IpPacket::parse(&before).unwrap().corrupt(&mut after, chance, passes);
            prop_assert_eq!(is_sound(&after), passes);
            prop_assert_eq!(&before[..20], &after[..20]);
            let flipped = |from: usize| -> u32 {
                (from..before.len()).map(|at| (before[at] ^ after[at]).count_ones()).sum()
            };
            prop_assert_eq!(flipped(if passes { 28 } else { 20 }), 1);
        }

        #[test]
        fn any_bytes_are_safe(mut bytes in proptest::collection::vec(any::<u8>(), 0..80), chance: u64) {
            if let Some(header) = IpPacket::parse(&bytes) {
                let _ = header.flow_hash(0);
                header.mark(&mut bytes);
                header.corrupt(&mut bytes, chance, true);
                header.corrupt(&mut bytes, chance, false);
            }
        }
    }
}
