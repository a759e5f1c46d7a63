//! The reader that splits a byte stream into PDU headers and data, and what a queue that is fed from
//! a stream offers: a place for the data it waits for, so that they needn't be copied twice.

use zerocopy::FromBytes;

use super::pdu::{COMMON_BYTES, CommonHeader, HEADER_BYTES_MAX, Header, PduError};

/// A queue that takes the bytes of its connection.
pub trait StreamSink {
    /// Where the next bytes of the stream belong; empty unless the rest of some data is next.
    fn place(&mut self) -> &mut [u8];
    /// The first `bytes` of [`Self::place`] were filled.
    fn placed(&mut self, bytes: usize);
    /// Bytes from the connection, in any portions. A peer's fault becomes an event.
    fn receive(&mut self, input: &[u8]);
}

/// What the reader found next in the stream.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // handed over by value and matched at once
pub enum Piece<'a> {
    /// A header; `usize` bytes of data follow.
    Header(Header, usize),
    /// Data of the PDU whose header came last.
    Data(&'a [u8]),
}

/// Splits a stream into headers and data, whatever the sizes of the reads.
#[derive(Debug)]
pub struct PduReader {
    header: [u8; HEADER_BYTES_MAX],
    filled: usize,
    data_left: usize,
    data_max: usize,
}

impl PduReader {
    /// A reader that refuses PDUs with more than `data_max` bytes of data.
    #[must_use]
    pub fn new(data_max: usize) -> Self {
        Self { header: [0; HEADER_BYTES_MAX], filled: 0, data_left: 0, data_max }
    }

    /// Data bytes of the current PDU that are still to come.
    #[must_use]
    pub fn data_left(&self) -> usize {
        self.data_left
    }

    /// Notes that `bytes` of the current PDU's data were received past this reader.
    pub fn skip(&mut self, bytes: usize) {
        self.data_left = self.data_left.saturating_sub(bytes);
    }

    /// Takes the next piece off `input`; `None` if more input is needed.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Piece<'a>>, PduError> {
        if self.data_left > 0 {
            if input.is_empty() {
                return Ok(None);
            }
            let (data, rest) = input.split_at(self.data_left.min(input.len()));
            *input = rest;
            self.data_left -= data.len();
            return Ok(Some(Piece::Data(data)));
        }
        if !self.fill(input, COMMON_BYTES) {
            return Ok(None);
        }
        let common = CommonHeader::read_from_bytes(&self.header[..COMMON_BYTES])
            .map_err(|_| PduError::field(0, "truncated header"))?;
        let (header_bytes, data) = common.check(self.data_max)?;
        if !self.fill(input, header_bytes) {
            return Ok(None);
        }
        let header = Header::parse(&self.header[..header_bytes])?;
        self.filled = 0;
        self.data_left = data;
        Ok(Some(Piece::Header(header, data)))
    }

    fn fill(&mut self, input: &mut &[u8], wanted: usize) -> bool {
        let take = wanted.saturating_sub(self.filled).min(input.len());
        let (bytes, rest) = input.split_at(take);
        self.header[self.filled..self.filled + take].copy_from_slice(bytes);
        self.filled += take;
        *input = rest;
        self.filled >= wanted
    }
}
