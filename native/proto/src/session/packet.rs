//! The packet header and the message descriptor (`docs/formats/session-wire.md`, "Packet").
//!
//! A header that decodes is only well-formed; no field may be trusted before the tag is verified.

use crate::aead::{NONCE_BYTES, TAG_BYTES};

/// The protocol version, in the high half of the first byte. Establishment agrees on one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// Each end chooses by itself how often it acknowledges.
    V5 = 5,
    /// The sender asks for it.
    V6 = 6,
}

impl Version {
    /// The version with this number, if there is one.
    #[must_use]
    pub fn numbered(number: u8) -> Option<Self> {
        [Self::V5, Self::V6].into_iter().find(|version| *version as u8 == number)
    }
}

/// Bytes of the header that every packet has.
pub const HEADER_BYTES: usize = 32;
/// Bytes of the message descriptor that follows it in unit packets.
pub const DESCRIPTOR_BYTES: usize = 7;
/// Bytes of the immediate that follows the descriptor if the kind has one.
pub const IMMEDIATE_BYTES: usize = 4;
/// Most bytes of a unit packet besides its payload.
pub const DATA_OVERHEAD_BYTES_MAX: usize =
    HEADER_BYTES + DESCRIPTOR_BYTES + IMMEDIATE_BYTES + TAG_BYTES;
/// Most plaintext bytes of a control packet, so that it is no larger than the largest unit packet.
#[must_use]
pub fn control_bytes_max(unit_bytes: u16) -> usize {
    DATA_OVERHEAD_BYTES_MAX - HEADER_BYTES - TAG_BYTES + usize::from(unit_bytes)
}

/// First message number that does not fit its 48 bits.
pub const MESSAGE_END: u64 = 1 << 48;

const KIND_CONTROL: u8 = 0x0;
const KIND_UNIT: u8 = 0x1;
/// Added to [`KIND_UNIT`]: the message is a stream.
const FLAG_STREAM: u8 = 0x2;
/// Added to [`KIND_UNIT`]: the message has an immediate.
const FLAG_IMMEDIATE: u8 = 0x8;

/// What a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Control frames.
    Control,
    /// One data or parity unit of a message.
    Unit {
        /// Message number, below [`MESSAGE_END`].
        message: u64,
        /// Index of the unit in the order of first transmission (parity after each block).
        unit: u32,
        /// Message length in bytes, below 2^40; for a stream the range of its units.
        length: u64,
        /// Data units of a block; 0 with selective repeat.
        k: u8,
        /// Parity units of a block; 0 with selective repeat.
        m: u8,
        /// Whether the message is a stream, whose units are announced as it goes instead of in
        /// advance.
        is_stream: bool,
        /// The immediate, a word sent with the message.
        immediate: Option<u32>,
    },
}

/// A packet's unencrypted header and descriptor. All of it is additional authenticated data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Version of the session.
    pub version: Version,
    /// Connection id of the receiving end.
    pub connection_id: u64,
    /// Key epoch.
    pub epoch: u8,
    /// Path; first part of the nonce.
    pub channel: u32,
    /// Increases by one per packet of a channel; second part of the nonce.
    pub packet_number: u64,
    /// What the packet carries.
    pub kind: Kind,
}

/// The bytes are not a packet of any version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed packet")]
pub struct Malformed;

impl Header {
    /// The AEAD nonce: channel, then packet number.
    #[must_use]
    pub fn nonce(&self) -> [u8; NONCE_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..4].copy_from_slice(&self.channel.to_be_bytes());
        nonce[4..].copy_from_slice(&self.packet_number.to_be_bytes());
        nonce
    }

    /// Appends the header. Message number, unit and length must fit their fields.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (kind, message, unit) = match self.kind {
            Kind::Control => (KIND_CONTROL, 0, 0),
            Kind::Unit { message, unit, is_stream, immediate, .. } => {
                let stream = if is_stream { FLAG_STREAM } else { 0 };
                let flags = stream | immediate.map_or(0, |_| FLAG_IMMEDIATE);
                (KIND_UNIT | flags, message, unit)
            }
        };
        let mut bytes = [0; HEADER_BYTES + DESCRIPTOR_BYTES + IMMEDIATE_BYTES];
        let mut length = HEADER_BYTES;
        bytes[0] = (self.version as u8) << 4 | kind;
        bytes[1..9].copy_from_slice(&self.connection_id.to_be_bytes());
        bytes[9] = self.epoch;
        bytes[10..14].copy_from_slice(&self.channel.to_be_bytes());
        bytes[14..22].copy_from_slice(&self.packet_number.to_be_bytes());
        bytes[22..28].copy_from_slice(&message.to_be_bytes()[2..]);
        bytes[28..32].copy_from_slice(&unit.to_be_bytes());
        if let Kind::Unit { length: message_bytes, k, m, immediate, .. } = self.kind {
            bytes[32..37].copy_from_slice(&message_bytes.to_be_bytes()[3..]);
            bytes[37..39].copy_from_slice(&[k, m]);
            length += DESCRIPTOR_BYTES;
            if let Some(immediate) = immediate {
                bytes[39..43].copy_from_slice(&immediate.to_be_bytes());
                length += IMMEDIATE_BYTES;
            }
        }
        out.extend_from_slice(&bytes[..length]);
    }

    /// Decodes a header; returns it and its length, which is the offset of the ciphertext.
    pub fn decode(datagram: &[u8]) -> Result<(Self, usize), Malformed> {
        let (fixed, rest) = datagram.split_first_chunk::<HEADER_BYTES>().ok_or(Malformed)?;
        let version = Version::numbered(fixed[0] >> 4).ok_or(Malformed)?;
        let message = be(&fixed[22..28]);
        let unit = be(&fixed[28..32]) as u32;
        let (kind, length) = match fixed[0] & 0x0f {
            KIND_CONTROL if message == 0 && unit == 0 => (Kind::Control, HEADER_BYTES),
            kind if kind & !(FLAG_STREAM | FLAG_IMMEDIATE) == KIND_UNIT => {
                let descriptor = rest.first_chunk::<DESCRIPTOR_BYTES>().ok_or(Malformed)?;
                let mut end = HEADER_BYTES + DESCRIPTOR_BYTES;
                let mut immediate = None;
                if kind & FLAG_IMMEDIATE != 0 {
                    let bytes = datagram.get(end..end + IMMEDIATE_BYTES).ok_or(Malformed)?;
                    immediate = Some(be(bytes) as u32);
                    end += IMMEDIATE_BYTES;
                }
                let (k, m) = (descriptor[5], descriptor[6]);
                let length = be(&descriptor[..5]);
                let is_stream = kind & FLAG_STREAM != 0;
                (Kind::Unit { message, unit, length, k, m, is_stream, immediate }, end)
            }
            _ => return Err(Malformed),
        };
        let header = Self {
            version,
            connection_id: be(&fixed[1..9]),
            epoch: fixed[9],
            channel: be(&fixed[10..14]) as u32,
            packet_number: be(&fixed[14..22]),
            kind,
        };
        Ok((header, length))
    }
}

/// The channel in a datagram's header, unchecked; `None` if the datagram is too short.
#[must_use]
pub fn channel_of(datagram: &[u8]) -> Option<u32> {
    datagram.get(10..14).map(|bytes| be(bytes) as u32)
}

/// A big-endian number of up to eight bytes.
pub(super) fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        let unit = (
            0..MESSAGE_END,
            any::<u32>(),
            0_u64..1 << 40,
            any::<u8>(),
            any::<u8>(),
            any::<bool>(),
            proptest::option::of(any::<u32>()),
        );
        prop_oneof![
            Just(Kind::Control),
            unit.prop_map(|(message, unit, length, k, m, is_stream, immediate)| Kind::Unit {
                message,
                unit,
                length,
                k,
                m,
                is_stream,
                immediate
            }),
        ]
    }

    prop_compose! {
        fn headers()(
            version in prop_oneof![Just(Version::V5), Just(Version::V6)], connection_id: u64,
            epoch: u8, channel: u32, packet_number: u64, kind in kinds(),
        ) -> Header {
            Header { version, connection_id, epoch, channel, packet_number, kind }
        }
    }

    proptest! {
        #[test]
        fn headers_round_trip_and_every_truncation_is_refused(header in headers()) {
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            prop_assert_eq!(Header::decode(&bytes), Ok((header, bytes.len())));
            prop_assert_eq!(channel_of(&bytes), Some(header.channel));
            for length in 0..bytes.len() {
                prop_assert_eq!(Header::decode(&bytes[..length]), Err(Malformed));
            }
        }

        #[test]
        fn every_byte_counts(header in headers(), at: prop::sample::Index, flip in 1_u8..) {
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert_ne!(Header::decode(&bytes), Ok((header, bytes.len())));
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes: Vec<u8>) {
            let _ = Header::decode(&bytes);
        }
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let header = Header {
            version: Version::V6,
            connection_id: 0x0102_0304_0506_0708,
            epoch: 0x09,
            channel: 0x0a0b_0c0d,
            packet_number: 0x0e0f_1011_1213_1415,
            kind: Kind::Unit {
                message: 0x1617_1819_1a1b,
                unit: 0x1c1d_1e1f,
                length: 0x20_2122_2324,
                k: 0x25,
                m: 0x26,
                is_stream: true,
                immediate: Some(0x2728_292a),
            },
        };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        let expected: Vec<u8> = std::iter::once(0x6b).chain(1..=0x2a).collect();
        assert_eq!(bytes, expected);
        let nonce = [0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15];
        assert_eq!(header.nonce(), nonce);
        let mut earlier = Vec::new();
        Header { version: Version::V5, ..header }.encode(&mut earlier);
        assert_eq!(earlier, std::iter::once(0x5b).chain(1..=0x2a).collect::<Vec<u8>>());
    }
}
