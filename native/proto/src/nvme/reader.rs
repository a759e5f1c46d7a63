//! Splits a byte stream into PDU headers and data and checks their digests. Also the interface of a
//! queue that is fed from a stream: it offers a place for the data it expects, so that they aren't
//! copied twice.

use zerocopy::FromBytes;

use super::pdu::{
    self, COMMON_BYTES, CommonHeader, DIGEST_BYTES, HEADER_BYTES_MAX, Header, Layout, PduError,
    PduLimits,
};

/// A queue that takes the bytes of its connection.
pub trait StreamSink {
    /// Place for the next bytes of the stream; empty unless the rest of some data comes next.
    fn place(&mut self) -> &mut [u8];
    /// The first `bytes` of [`Self::place`] were filled.
    fn placed(&mut self, bytes: usize);
    /// Takes bytes from the connection, in any portions. A fault of the peer becomes an event.
    fn receive(&mut self, input: &[u8]);
}

/// The next piece of the stream.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // passed by value and matched at once
pub enum Piece<'a> {
    /// A header; `usize` bytes of data follow.
    Header(Header, usize),
    /// Data of the PDU whose header came last.
    Data(&'a [u8]),
    /// The data of the PDU are complete; false if they have a digest that doesn't match.
    End(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    Data,
    Digest,
    End,
}

/// Splits a stream into headers and data, regardless of the sizes of the reads.
#[derive(Debug)]
pub struct PduReader {
    limits: PduLimits,
    header: [u8; HEADER_BYTES_MAX + DIGEST_BYTES],
    filled: usize,
    /// Bytes of the previous header, until the first byte of the next one arrives.
    previous: usize,
    state: State,
    layout: Layout,
    data_left: usize,
    checksum: u32,
    digest: [u8; DIGEST_BYTES],
    digest_filled: usize,
}

impl PduReader {
    /// Creates a reader that refuses PDUs beyond `limits`.
    #[must_use]
    pub fn new(limits: PduLimits) -> Self {
        Self {
            limits,
            header: [0; HEADER_BYTES_MAX + DIGEST_BYTES],
            filled: 0,
            previous: 0,
            state: State::Header,
            layout: Layout::default(),
            data_left: 0,
            checksum: 0,
            digest: [0; DIGEST_BYTES],
            digest_filled: 0,
        }
    }

    /// Remaining data bytes of the current PDU.
    #[must_use]
    pub fn data_left(&self) -> usize {
        self.data_left
    }

    /// The header being read, or the last one, which a termination request quotes.
    #[must_use]
    pub fn header(&self) -> &[u8] {
        let bytes = if self.filled > 0 { self.filled } else { self.previous };
        self.header.get(..bytes.min(HEADER_BYTES_MAX)).unwrap_or_default()
    }

    /// Accounts for data of the current PDU that were received without this reader.
    pub fn skip(&mut self, data: &[u8]) {
        if self.layout.has_data_digest {
            self.checksum = crc32c::crc32c_append(self.checksum, data);
        }
        self.data_left = self.data_left.saturating_sub(data.len());
        if self.data_left == 0 && self.state == State::Data {
            self.state = if self.layout.has_data_digest { State::Digest } else { State::End };
        }
    }

    /// Takes the next piece from `input`; `None` if more input is needed.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Piece<'a>>, PduError> {
        match self.state {
            State::Header => self.next_header(input),
            State::Data if input.is_empty() => Ok(None),
            State::Data => {
                let (data, rest) = input.split_at(self.data_left.min(input.len()));
                *input = rest;
                self.skip(data);
                Ok(Some(Piece::Data(data)))
            }
            State::Digest => {
                fill(&mut self.digest, &mut self.digest_filled, input, DIGEST_BYTES);
                if self.digest_filled < DIGEST_BYTES {
                    return Ok(None);
                }
                self.state = State::Header;
                Ok(Some(Piece::End(self.digest == self.checksum.to_le_bytes())))
            }
            State::End => {
                self.state = State::Header;
                Ok(Some(Piece::End(true)))
            }
        }
    }

    fn next_header<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Piece<'a>>, PduError> {
        fill(&mut self.header, &mut self.filled, input, COMMON_BYTES);
        if self.filled < COMMON_BYTES {
            return Ok(None);
        }
        let (common, _) = CommonHeader::read_from_prefix(&self.header)
            .map_err(|_| PduError::field(0, "truncated header"))?;
        let layout = common.check(&self.limits)?;
        let wanted = layout.bytes_before_data();
        fill(&mut self.header, &mut self.filled, input, wanted);
        if self.filled < wanted {
            return Ok(None);
        }
        self.previous = layout.header_bytes;
        self.filled = 0;
        let (bytes, rest) = self.header.split_at(layout.header_bytes);
        if layout.has_header_digest {
            check_header_digest(bytes, rest.first_chunk().copied().unwrap_or_default())?;
        }
        let header = Header::parse(bytes, &layout)?;
        self.layout = layout;
        self.data_left = layout.data_bytes;
        self.checksum = 0;
        self.digest_filled = 0;
        self.state = if layout.data_bytes > 0 { State::Data } else { State::Header };
        Ok(Some(Piece::Header(header, layout.data_bytes)))
    }
}

/// Checks a header against its digest. The termination request quotes the digest received.
pub fn check_header_digest(header: &[u8], digest: [u8; DIGEST_BYTES]) -> Result<(), PduError> {
    if pdu::digest(header).to_le_bytes() == digest {
        Ok(())
    } else {
        Err(PduError::header_digest(u32::from_le_bytes(digest)))
    }
}

/// Moves bytes from `input` until `wanted` bytes of `buffer` are filled or the input is empty.
fn fill(buffer: &mut [u8], filled: &mut usize, input: &mut &[u8], wanted: usize) {
    let take = wanted.saturating_sub(*filled).min(input.len());
    let (bytes, rest) = input.split_at(take);
    if let Some(place) = buffer.get_mut(*filled..*filled + take) {
        place.copy_from_slice(bytes);
        *filled += take;
    }
    *input = rest;
}
