//! NVMe/TCP PDU headers and their layout (NVMe/TCP Transport 1.0 §3.6). Data follow the header and
//! its digest directly, as no padding is negotiated.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::command::{CompletionEntry, SubmissionEntry};

/// Bytes of the header that all PDUs start with.
pub const COMMON_BYTES: usize = 8;
/// Bytes of the longest header (ICReq, ICResp).
pub const HEADER_BYTES_MAX: usize = 128;
/// Bytes of a digest (CRC32C, little endian).
pub const DIGEST_BYTES: usize = 4;
/// Maximum data bytes of a termination request (the offending header).
pub const TERMINATION_DATA_MAX: usize = 128;
/// Flag: a digest follows the header.
pub const FLAG_HEADER_DIGEST: u8 = 0x01;
/// Flag: a digest follows the data.
pub const FLAG_DATA_DIGEST: u8 = 0x02;
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
    /// Whether every header has one.
    pub header: bool,
    /// Whether the data of every PDU with data have one.
    pub data: bool,
}

impl Digests {
    /// From the DGST field of ICReq or ICResp; undefined bits are ignored.
    #[must_use]
    pub fn from_field(field: u8) -> Self {
        Self { header: field & FLAG_HEADER_DIGEST != 0, data: field & FLAG_DATA_DIGEST != 0 }
    }

    /// The DGST field of ICReq or ICResp.
    #[must_use]
    pub fn field(self) -> u8 {
        u8::from(self.header) * FLAG_HEADER_DIGEST + u8::from(self.data) * FLAG_DATA_DIGEST
    }
}

/// Limits against which PDUs are checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PduLimits {
    /// Maximum data bytes of a command capsule.
    pub capsule_data_max: usize,
    /// Maximum data bytes of a data PDU.
    pub data_max: usize,
    /// Digests negotiated.
    pub digests: Digests,
}

/// Layout of a PDU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the header.
    pub header_bytes: usize,
    /// Whether a digest of the header follows it.
    pub has_header_digest: bool,
    /// Bytes of data.
    pub data_bytes: usize,
    /// Whether a digest of the data follows them.
    pub has_data_digest: bool,
}

impl Layout {
    /// Bytes of the header and its digest.
    #[must_use]
    pub fn bytes_before_data(&self) -> usize {
        self.header_bytes + if self.has_header_digest { DIGEST_BYTES } else { 0 }
    }

    /// Bytes of the data and their digest.
    #[must_use]
    pub fn bytes_of_data(&self) -> usize {
        self.data_bytes + if self.has_data_digest { DIGEST_BYTES } else { 0 }
    }
}

/// A PDU breaks the rules. `code` and `offset` go into a termination request (fields FES, FEI).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed PDU: {what} (fatal error {code}, information {offset})")]
pub struct PduError {
    /// Fatal error status: 1 header field, 2 sequence, 3 header digest, 4 data range, 5 limit,
    /// 6 unsupported.
    pub code: u16,
    /// Byte offset of the wrong field in the header; for a header digest, the digest received.
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
    /// An unexpected PDU.
    #[must_use]
    pub const fn sequence(what: &'static str) -> Self {
        Self { code: 2, offset: 0, what }
    }
    /// The header doesn't match the digest received.
    #[must_use]
    pub const fn header_digest(received: u32) -> Self {
        Self { code: 3, offset: received, what: "header digest" }
    }
    /// More data than the announced limit.
    #[must_use]
    pub const fn limit(what: &'static str) -> Self {
        Self { code: 5, offset: 0, what }
    }
    /// Data outside of their transfer.
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
    /// Bytes of the header, including this part.
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
        /// Digests requested.
        digests: u8,
        /// Maximum outstanding R2Ts per command, minus one.
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
        /// Maximum data bytes of one H2CData PDU.
        h2c_data_max: U32,
        /// Must be 0.
        reserved: [u8; 112],
    } 128
}
wire_struct! {
    /// Termination request, either direction.
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
        /// Command id of the data.
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
        /// Transfer tag for the answer.
        tag: U16,
        /// Offset in the command's data.
        offset: U32,
        /// Bytes requested.
        length: U32,
        /// Must be 0.
        reserved: [u8; 4],
    } 24
}

const SHORT: PduError = PduError::field(2, "truncated header");

fn read<T: FromBytes>(bytes: &[u8]) -> Result<T, PduError> {
    T::read_from_bytes(bytes).map_err(|_| SHORT)
}

/// The digest of a header or of data.
#[must_use]
pub fn digest(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// The digest of data that lie in several parts.
#[must_use]
pub fn digest_of_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u32 {
    parts.fold(0, crc32c::crc32c_append)
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

fn digests_of(kind_of: u8, negotiated: Digests) -> Digests {
    match kind_of {
        kind::IC_REQ | kind::IC_RESP | kind::H2C_TERM | kind::C2H_TERM => Digests::default(),
        kind::CAPSULE_CMD | kind::H2C_DATA | kind::C2H_DATA => negotiated,
        _ => Digests { data: false, ..negotiated },
    }
}

impl CommonHeader {
    /// A header for `kind`, followed by `data` bytes, with the negotiated digests.
    ///
    /// # Panics
    /// If `kind` isn't in the table, which is a defect in the caller.
    #[must_use]
    pub fn new(kind: u8, flags: u8, data: usize, negotiated: Digests) -> Self {
        let header_bytes = header_bytes(kind).expect("a PDU type of the table");
        let digests = digests_of(kind, negotiated);
        let digests = Digests { data: digests.data && data > 0, ..digests };
        let layout = Layout {
            header_bytes,
            has_header_digest: digests.header,
            data_bytes: data,
            has_data_digest: digests.data,
        };
        Self {
            kind,
            flags: flags | digests.field(),
            header_bytes: header_bytes as u8,
            data_offset: if data == 0 { 0 } else { layout.bytes_before_data() as u8 },
            pdu_bytes: ((layout.bytes_before_data() + layout.bytes_of_data()) as u32).into(),
        }
    }

    /// Checks type, flags and lengths against `limits`; returns the layout.
    pub fn check(&self, limits: &PduLimits) -> Result<Layout, PduError> {
        let header_bytes = header_bytes(self.kind).ok_or(PduError::field(0, "unknown PDU type"))?;
        let digests = digests_of(self.kind, limits.digests);
        let digest_flags = FLAG_HEADER_DIGEST | FLAG_DATA_DIGEST;
        if self.flags & !(flags_allowed(self.kind) | digest_flags) != 0 {
            return Err(PduError::field(1, "reserved flags"));
        }
        if usize::from(self.header_bytes) != header_bytes {
            return Err(PduError::field(2, "header length"));
        }
        let has_header_digest = digests.header;
        let mut layout =
            Layout { header_bytes, has_header_digest, data_bytes: 0, has_data_digest: false };
        let before = layout.bytes_before_data();
        let total = usize::try_from(self.pdu_bytes.get()).unwrap_or(usize::MAX);
        let rest = total.checked_sub(before).ok_or(PduError::field(4, "PDU length"))?;
        layout.has_data_digest = digests.data && rest > 0;
        let tail = if layout.has_data_digest { DIGEST_BYTES } else { 0 };
        layout.data_bytes = rest.checked_sub(tail).ok_or(PduError::field(4, "PDU length"))?;
        if layout.has_data_digest && layout.data_bytes == 0 {
            return Err(PduError::field(4, "a digest of no data"));
        }
        let expected = Digests { header: has_header_digest, data: layout.has_data_digest };
        if self.flags & digest_flags != expected.field() {
            return Err(PduError::field(1, "other digests than were negotiated"));
        }
        self.check_data(layout, limits)?;
        Ok(layout)
    }

    fn check_data(self, layout: Layout, limits: &PduLimits) -> Result<(), PduError> {
        let is_termination = matches!(self.kind, kind::H2C_TERM | kind::C2H_TERM);
        let (limit, refusal) = match self.kind {
            kind::CAPSULE_CMD => {
                (limits.capsule_data_max, PduError::limit("in-capsule data above the limit"))
            }
            kind::H2C_DATA | kind::C2H_DATA => {
                (limits.data_max, PduError::limit("data above the limit"))
            }
            _ if is_termination => (TERMINATION_DATA_MAX, PduError::field(4, "PDU length")),
            _ => (0, PduError::field(4, "PDU length")),
        };
        if layout.data_bytes > limit {
            return Err(refusal);
        }
        let offset = usize::from(self.data_offset);
        let is_right = offset == layout.bytes_before_data();
        // Without data the field is meaningless: both 0 and the end of the header are in use.
        if is_right || is_termination || (layout.data_bytes == 0 && offset == 0) {
            Ok(())
        } else {
            Err(PduError::field(3, "data offset"))
        }
    }
}

impl Header {
    /// Parses exactly one header, without its digest; `layout` is from [`CommonHeader::check`].
    pub fn parse(bytes: &[u8], layout: &Layout) -> Result<Self, PduError> {
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
            let length = data.length.get() as usize;
            if length != layout.data_bytes || length == 0 {
                return Err(PduError::field(16, "data length"));
            }
        }
        Ok(header)
    }
}

/// The whole PDU of a termination request for `error`, with the header at fault, from the host or
/// (`from_host` false) the controller.
#[must_use]
pub fn termination(from_host: bool, error: PduError, offending: &[u8]) -> Vec<u8> {
    let kind_of = if from_host { kind::H2C_TERM } else { kind::C2H_TERM };
    let quoted = offending.get(..offending.len().min(TERMINATION_DATA_MAX)).unwrap_or_default();
    let request = TermReq {
        common: CommonHeader::new(kind_of, 0, quoted.len(), Digests::default()),
        code: error.code.into(),
        information: error.offset.into(),
        reserved: [0; 10],
    };
    [request.as_bytes(), quoted].concat()
}

#[cfg(test)]
#[path = "pdu_tests.rs"]
mod tests;
