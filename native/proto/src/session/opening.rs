//! Opens packets away from the machine, in another thread: the machine then accepts them without
//! an AEAD operation of its own.

use std::sync::Arc;

use crate::aead::{AeadKey, TAG_BYTES};

use super::packet::{Header, Version};

/// Result of an AEAD operation on a packet, and the epoch of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) epoch: u64,
    pub(super) is_authentic: bool,
}

/// A datagram from the network, perhaps opened in place already.
#[derive(Debug)]
pub struct Received<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) verdict: Option<Verdict>,
}

impl<'a> Received<'a> {
    /// A datagram that nobody has opened.
    pub fn sealed(bytes: &'a mut [u8]) -> Self {
        Self { bytes, verdict: None }
    }

    /// Whether an [`Opener`] has tried to open it.
    #[must_use]
    pub fn is_tried(&self) -> bool {
        self.verdict.is_some()
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }
}

/// The receiving keys of a session at one time.
#[derive(Debug)]
pub struct Opener {
    pub(super) version: Version,
    pub(super) connection_id: u64,
    /// Epoch in headers, epoch, key.
    pub(super) keys: Vec<(u8, u64, Arc<AeadKey>)>,
}

impl Opener {
    /// Opens no packet.
    #[must_use]
    pub fn without_keys() -> Self {
        Self { version: Version::V6, connection_id: 0, keys: Vec::new() }
    }

    /// Opens a packet in place if it is one of the session under a known key. What is wrong with it
    /// otherwise, the machine finds out.
    fn open(&self, datagram: &mut [u8]) -> Option<Verdict> {
        let (header, end) = Header::decode(datagram).ok()?;
        if header.version != self.version {
            return None;
        }
        if header.connection_id != self.connection_id {
            return None;
        }
        let (_, epoch, key) = self.keys.iter().find(|(wire, ..)| *wire == header.epoch)?;
        let (aad, sealed) = datagram.split_at_mut(end);
        if sealed.len() < TAG_BYTES {
            return None;
        }
        let is_authentic = key.open_in_place(header.nonce(), aad, sealed).is_ok();
        Some(Verdict { epoch: *epoch, is_authentic })
    }
}

/// Datagrams that arrived together, of one size except for the last, which may be shorter.
#[derive(Debug)]
pub struct Arrivals {
    buffer: Vec<u8>,
    length: usize,
    stride: usize,
    verdicts: Vec<Option<Verdict>>,
}

impl Arrivals {
    /// The first `length` bytes of a buffer that nobody else can access: datagrams of `stride`
    /// bytes, opened unless `opener` is `None`.
    #[must_use]
    pub fn new(
        mut buffer: Vec<u8>,
        (length, stride): (usize, usize),
        opener: Option<&Opener>,
    ) -> Self {
        let length = length.min(buffer.len());
        let stride = stride.max(1);
        let datagrams = buffer[..length].chunks_mut(stride);
        let verdicts = datagrams.map(|datagram| opener?.open(datagram)).collect();
        Self { buffer, length, stride, verdicts }
    }

    /// Bytes of all datagrams.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is no datagram.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The datagrams in the order of their arrival.
    pub fn datagrams(&mut self) -> impl Iterator<Item = Received<'_>> {
        let datagrams = self.buffer[..self.length].chunks_mut(self.stride);
        datagrams.zip(&self.verdicts).map(|(bytes, verdict)| Received { bytes, verdict: *verdict })
    }

    /// The buffer, for reuse.
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        self.buffer
    }
}
