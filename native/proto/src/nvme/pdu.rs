//! NVMe/TCP PDU headers (NVMe/TCP Transport 1.0 §3.6). No digests, no padding: both are negotiated away.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::command::{CompletionEntry, SubmissionEntry};

/// Bytes of the header that all PDUs start with.
pub const COMMON_BYTES: usize = 8;
/// Bytes of the longest header (ICReq, ICResp).
pub const HEADER_BYTES_MAX: usize = 128;
/// Most data bytes a termination request may carry (the offending header).
pub const TERMINATION_DATA_MAX: usize = 128;
/// Flag: last data PDU of this transfer.
pub const FLAG_LAST: u8 = 0x04;
/// Flag: the command succeeded, no response capsule follows.
pub const FLAG_SUCCESS: u8 = 0x08;

/// PDU types.
pub mod kind {
    #![allow(missing_docs)]
    pub const IC_REQ: u8 = 0x00;
    pub const IC_RESP: u8 = 0x01;
    pub const H2C_TERM: u8 = 0x02;
    pub const C2H_TERM: u8 = 0x03;
    pub const CAPSULE_CMD: u8 = 0x04;
    pub const CAPSULE_RESP: u8 = 0x05;
    pub const H2C_DATA: u8 = 0x06;
    pub const C2H_DATA: u8 = 0x07;
    pub const R2T: u8 = 0x09;
}

/// Digests (CRC32C) negotiated for a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digests {
    /// Of every header.
    pub header: bool,
    /// Of the data of every PDU that carries some.
    pub data: bool,
}

/// A PDU breaks the rules. `code` and `offset` go into a termination request (fields FES, FEI).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed PDU: {what} (fatal error {code}, at byte {offset})")]
pub struct PduError {
    /// Fatal error status: 1 header field, 2 sequence, 4 data range, 5 limit, 6 unsupported.
    pub code: u16,
    /// Byte offset in the header of the field that is wrong.
    pub offset: u32,
    /// What is wrong.
    pub what: &'static str,
}

impl PduError {
    /// A header field is wrong.
    #[must_use]
    pub const fn field(offset: u32, what: &'static str) -> Self {
        Self { code: 1, offset, what }
    }
    /// A PDU that isn't expected now.
    #[must_use]
    pub const fn sequence(what: &'static str) -> Self {
        Self { code: 2, offset: 0, what }
    }
    /// Data outside the transfer it belongs to.
    #[must_use]
    pub const fn range(what: &'static str) -> Self {
        Self { code: 4, offset: 0, what }
    }
}

/// The first eight bytes of every PDU.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct CommonHeader {
    /// PDU type.
    pub kind: u8,
    /// Flags.
    pub flags: u8,
    /// Bytes of the header, this part included.
    pub header_bytes: u8,
    /// Offset of the data, 0 if there is none.
    pub data_offset: u8,
    /// Bytes of the whole PDU.
    pub pdu_bytes: U32,
}

macro_rules! wire_struct {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* } $bytes:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
                 Unaligned)]
        #[repr(C)]
        pub struct $name {
            /// Common header.
            pub common: CommonHeader,
            $($(#[$field_doc])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $bytes);
    };
}

wire_struct! {
    /// Initialize Connection Request.
    IcReq {
        /// Format version; 0.
        version: U16,
        /// Host's data alignment, in dwords minus one.
        alignment: u8,
        /// Digests asked for.
        digests: u8,
        /// Most outstanding R2Ts per command, minus one.
        r2t_max: U32,
        /// Must be 0.
        reserved: [u8; 112],
    } 128
}
wire_struct! {
    /// Initialize Connection Response.
    IcResp {
        /// Format version; 0.
        version: U16,
        /// Controller's data alignment, in dwords minus one.
        alignment: u8,
        /// Digests granted.
        digests: u8,
        /// Most data bytes of one H2CData PDU.
        h2c_data_max: U32,
        /// Must be 0.
        reserved: [u8; 112],
    } 128
}
wire_struct! {
    /// Termination request of either direction.
    TermReq {
        /// Fatal error status.
        code: U16,
        /// Fatal error information.
        information: U32,
        /// Must be 0.
        reserved: [u8; 10],
    } 24
}
wire_struct! {
    /// Command capsule.
    CapsuleCmd {
        /// The submission entry.
        entry: SubmissionEntry,
    } 72
}
wire_struct! {
    /// Response capsule.
    CapsuleResp {
        /// The completion entry.
        entry: CompletionEntry,
    } 24
}
wire_struct! {
    /// Data, either direction.
    DataHeader {
        /// Command id the data belongs to.
        cid: U16,
        /// Transfer tag (host to controller only).
        tag: U16,
        /// Offset in the command's data.
        offset: U32,
        /// Bytes of data in this PDU.
        length: U32,
        /// Must be 0.
        reserved: [u8; 4],
    } 24
}
wire_struct! {
    /// Ready to transfer.
    R2t {
        /// Command id.
        cid: U16,
        /// Transfer tag to answer with.
        tag: U16,
        /// Offset in the command's data.
        offset: U32,
        /// Bytes asked for.
        length: U32,
        /// Must be 0.
        reserved: [u8; 4],
    } 24
}

const SHORT: PduError = PduError::field(2, "truncated header");

fn read<T: FromBytes>(bytes: &[u8]) -> Result<T, PduError> {
    T::read_from_bytes(bytes).map_err(|_| SHORT)
}

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // a header is parsed, matched and dropped, never stored
pub enum Header {
    /// ICReq.
    IcReq(IcReq),
    /// ICResp.
    IcResp(IcResp),
    /// H2CTermReq.
    HostTermination(TermReq),
    /// C2HTermReq.
    ControllerTermination(TermReq),
    /// Command capsule; in-capsule data follows.
    CapsuleCmd(CapsuleCmd),
    /// Response capsule.
    CapsuleResp(CapsuleResp),
    /// Data from the host follows.
    HostData(DataHeader),
    /// Data from the controller follows.
    ControllerData(DataHeader),
    /// Ready to transfer.
    R2t(R2t),
}

fn header_bytes(kind_of: u8) -> Option<usize> {
    Some(match kind_of {
        kind::IC_REQ | kind::IC_RESP => 128,
        kind::CAPSULE_CMD => 72,
        kind::H2C_TERM
        | kind::C2H_TERM
        | kind::CAPSULE_RESP
        | kind::H2C_DATA
        | kind::C2H_DATA
        | kind::R2T => 24,
        _ => return None,
    })
}

fn flags_allowed(kind_of: u8) -> u8 {
    match kind_of {
        kind::H2C_DATA => FLAG_LAST,
        kind::C2H_DATA => FLAG_LAST | FLAG_SUCCESS,
        _ => 0,
    }
}

impl CommonHeader {
    /// A header for `kind` with `data` bytes behind it.
    ///
    /// # Panics
    /// If `kind` isn't one of the table, which is a mistake in the caller's code.
    #[must_use]
    pub fn new(kind: u8, flags: u8, data: usize) -> Self {
        let bytes = header_bytes(kind).expect("a PDU type of the table");
        Self {
            kind,
            flags,
            header_bytes: bytes as u8,
            data_offset: if data == 0 { 0 } else { bytes as u8 },
            pdu_bytes: ((bytes + data) as u32).into(),
        }
    }

    /// Checks type, flags and lengths against `data_max`; returns (header bytes, data bytes).
    pub fn check(&self, data_max: usize) -> Result<(usize, usize), PduError> {
        let bytes = header_bytes(self.kind).ok_or(PduError::field(0, "unknown PDU type"))?;
        if self.flags & !flags_allowed(self.kind) != 0 {
            return Err(PduError::field(1, "flags that were not negotiated"));
        }
        if usize::from(self.header_bytes) != bytes {
            return Err(PduError::field(2, "header length"));
        }
        let total = usize::try_from(self.pdu_bytes.get()).unwrap_or(usize::MAX);
        let data = total.checked_sub(bytes).ok_or(PduError::field(4, "PDU length"))?;
        let limit = match self.kind {
            kind::CAPSULE_CMD | kind::H2C_DATA | kind::C2H_DATA => data_max,
            kind::H2C_TERM | kind::C2H_TERM => TERMINATION_DATA_MAX,
            _ => 0,
        };
        if data > limit {
            return Err(PduError::field(4, "PDU length above the limit"));
        }
        let termination = matches!(self.kind, kind::H2C_TERM | kind::C2H_TERM);
        if data > 0 && !termination && usize::from(self.data_offset) != bytes {
            return Err(PduError::field(3, "data offset"));
        }
        if data == 0 && self.data_offset != 0 && usize::from(self.data_offset) != bytes {
            return Err(PduError::field(3, "data offset"));
        }
        Ok((bytes, data))
    }
}

impl Header {
    /// Parses exactly one header; lengths were checked by [`CommonHeader::check`].
    pub fn parse(bytes: &[u8]) -> Result<Self, PduError> {
        let kind_of = *bytes.first().ok_or(SHORT)?;
        let header = match kind_of {
            kind::IC_REQ => Self::IcReq(read(bytes)?),
            kind::IC_RESP => Self::IcResp(read(bytes)?),
            kind::H2C_TERM => Self::HostTermination(read(bytes)?),
            kind::C2H_TERM => Self::ControllerTermination(read(bytes)?),
            kind::CAPSULE_CMD => Self::CapsuleCmd(read(bytes)?),
            kind::CAPSULE_RESP => Self::CapsuleResp(read(bytes)?),
            kind::H2C_DATA => Self::HostData(read(bytes)?),
            kind::C2H_DATA => Self::ControllerData(read(bytes)?),
            kind::R2T => Self::R2t(read(bytes)?),
            _ => return Err(PduError::field(0, "unknown PDU type")),
        };
        if let Self::HostData(data) | Self::ControllerData(data) = &header {
            let carried = data.common.pdu_bytes.get().checked_sub(24);
            if carried != Some(data.length.get()) || data.length.get() == 0 {
                return Err(PduError::field(16, "data length"));
            }
        }
        Ok(header)
    }
}

/// A termination request for `error`, as the controller (`from_host` false) or the host sends it.
#[must_use]
pub fn termination(from_host: bool, error: PduError) -> TermReq {
    let kind_of = if from_host { kind::H2C_TERM } else { kind::C2H_TERM };
    TermReq {
        common: CommonHeader::new(kind_of, 0, 0),
        code: error.code.into(),
        information: error.offset.into(),
        reserved: [0; 10],
    }
}

#[cfg(test)]
mod tests {
    use super::super::reader::{PduReader, Piece};
    use super::*;
    use proptest::prelude::*;

    fn data_pdu(kind_of: u8, flags: u8, data: &[u8]) -> Vec<u8> {
        let header = DataHeader {
            common: CommonHeader::new(kind_of, flags, data.len()),
            cid: 7.into(),
            tag: 9.into(),
            offset: 4096.into(),
            length: (data.len() as u32).into(),
            reserved: [0; 4],
        };
        [header.as_bytes(), data].concat()
    }

    fn stream() -> Vec<u8> {
        let command = CapsuleCmd {
            common: CommonHeader::new(kind::CAPSULE_CMD, 0, 3),
            entry: SubmissionEntry { opcode: 1, ..SubmissionEntry::default() },
        };
        let response = CapsuleResp {
            common: CommonHeader::new(kind::CAPSULE_RESP, 0, 0),
            entry: CompletionEntry::default(),
        };
        [
            command.as_bytes(),
            b"abc",
            &data_pdu(kind::H2C_DATA, FLAG_LAST, b"host data"),
            &data_pdu(kind::C2H_DATA, FLAG_LAST | FLAG_SUCCESS, b"controller data"),
            response.as_bytes(),
            termination(true, PduError::field(3, "x")).as_bytes(),
        ]
        .concat()
    }

    fn read_all(bytes: &[u8], cuts: &[usize]) -> Result<(Vec<Header>, Vec<u8>), PduError> {
        let mut reader = PduReader::new(64);
        let (mut headers, mut data) = (Vec::new(), Vec::new());
        let mut start = 0;
        for &cut in cuts.iter().chain([&bytes.len()]) {
            let mut input = &bytes[start..cut.max(start)];
            start = cut.max(start);
            while let Some(piece) = reader.next(&mut input)? {
                match piece {
                    Piece::Header(header, _) => headers.push(header),
                    Piece::Data(bytes) => data.extend_from_slice(bytes),
                }
            }
        }
        Ok((headers, data))
    }

    proptest! {
        #[test]
        fn any_split_of_the_stream_reads_the_same(
            cuts in proptest::collection::vec(0usize..300, 0..20),
        ) {
            let bytes = stream();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.sort_unstable();
            let (headers, data) = read_all(&bytes, &cuts).unwrap();
            prop_assert_eq!(headers.len(), 5);
            prop_assert_eq!(data, b"abchost datacontroller data".to_vec());
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_never_exceed_the_limit(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let mut reader = PduReader::new(64);
            let mut input = &bytes[..];
            while let Ok(Some(piece)) = reader.next(&mut input) {
                if let Piece::Header(_, data) = piece {
                    prop_assert!(data <= TERMINATION_DATA_MAX);
                }
            }
        }
    }

    #[test]
    fn every_byte_flip_of_a_common_header_is_refused_or_another_valid_pdu() {
        let bytes = data_pdu(kind::C2H_DATA, FLAG_LAST, b"0123456789");
        for bit in 0..64 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok((headers, data)) = read_all(&flipped, &[]) {
                for header in headers {
                    if let Header::HostData(h) | Header::ControllerData(h) = header {
                        assert_eq!(h.length.get() as usize, data.len(), "bit {bit}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_truncation_waits_for_more() {
        let bytes = data_pdu(kind::H2C_DATA, 0, b"0123456789");
        for length in 0..24 {
            let (headers, data) = read_all(&bytes[..length], &[]).unwrap();
            assert!(headers.is_empty() && data.is_empty());
        }
    }

    #[test]
    fn lengths_that_contradict_each_other_are_refused() {
        let good = data_pdu(kind::H2C_DATA, 0, b"0123456789");
        for (offset, value) in [(2, 23), (3, 25), (4, 23), (4, 90), (5, 1), (16, 11), (1, 1)] {
            let mut bad = good.clone();
            bad[offset] = value;
            assert!(read_all(&bad, &[]).is_err(), "byte {offset} = {value}");
        }
    }
}
