//! Sealed blocks on a third party's namespace whose format has metadata: 4096 bytes of data and 64
//! of metadata in one extended LBA, protection information off.
//!
//! The drive changes a block as a whole. A volume of mode `local` uses the blocks through an
//! [`InPlaceStore`](super::in_place_store::InPlaceStore), which keeps them fresh. A volume of mode
//! `off` uses them bare, behind a label that says whose sectors they are (`docs/formats/stores.md`
//! §2a): sector *n* is block *n* + 1, nothing keeps them fresh, and no sector is ever unwritten, so
//! a new store must be filled before use.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sealane_proto::aead::Secret;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostLimits, HostQueue};

use super::super::store::{
    BLOCK_BYTES, BlockStore, DATA_BYTES, StoreChannel, StoreCounters, StoreDone, StoreRequest,
};
use super::fresh::keys::Authority;
use super::fresh::superblock::Superblock;
use super::label::Label;
use super::pages::{Page, random};
use super::remote_link::{Link, Transfer};
use super::ring::{clear, event, signal};

/// Number of blocks of a label.
const LABEL_BLOCKS: u64 = 1;

impl Transfer for StoreRequest {
    const UNIT_BYTES: usize = BLOCK_BYTES;

    fn units(&self) -> usize {
        match self {
            Self::Read { buffer, .. } | Self::Write { buffer, .. } => buffer.len() / BLOCK_BYTES,
            Self::Flush | Self::Deallocate { .. } => 1,
        }
    }

    fn command(&self, first: usize, units: usize, queue: &mut HostQueue) -> Option<HostCommand> {
        Some(match self {
            Self::Read { lba, .. } => {
                HostCommand::Read { lba: lba + first as u64, blocks: units as u32 }
            }
            Self::Write { lba, buffer, durable } => {
                let part = first * BLOCK_BYTES..(first + units) * BLOCK_BYTES;
                let part = buffer.get(part).unwrap_or_default();
                let mut data = queue.buffer(part.len());
                data.copy_from_slice(part);
                HostCommand::Write { lba: lba + first as u64, data, is_forced: *durable }
            }
            Self::Flush => HostCommand::Flush,
            // The target may return anything for a deallocated block.
            Self::Deallocate { .. } => return None,
        })
    }

    fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    fn place(&mut self) -> &mut [u8] {
        match self {
            Self::Read { buffer, .. } => buffer,
            _ => &mut [],
        }
    }
}

/// A namespace whose owner has not been checked yet.
pub struct RemoteBlocks {
    link: Link<StoreRequest>,
    block_count: u64,
}

impl fmt::Debug for RemoteBlocks {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block_count = self.block_count;
        formatter
            .debug_struct("RemoteBlocks")
            .field("block_count", &block_count)
            .finish_non_exhaustive()
    }
}

impl RemoteBlocks {
    /// Starts a link on a connected socket whose Connect command succeeded, for a namespace of
    /// `block_count` blocks of 4160 bytes. A command may take `timeout`.
    pub fn start(
        fd: OwnedFd,
        limits: HostLimits,
        block_count: u64,
        timeout: Duration,
    ) -> io::Result<Self> {
        Ok(Self { link: Link::start(fd, limits, usize::MAX, timeout)?, block_count })
    }

    fn first(&self) -> io::Result<Page> {
        let read = StoreRequest::Read { lba: 0, buffer: vec![0; BLOCK_BYTES] };
        let block = self.link.execute(read)?.into_buffer();
        let mut page = Page::ZERO;
        page.0.copy_from_slice(&block[..DATA_BYTES]);
        Ok(page)
    }

    fn put_first(&self, page: &Page) -> io::Result<()> {
        let mut buffer = page.0.to_vec();
        buffer.resize(BLOCK_BYTES, 0);
        self.link.execute(StoreRequest::Write { lba: 0, buffer, durable: true })?;
        self.link.execute(StoreRequest::Flush)?;
        Ok(())
    }

    /// Erases the store with this UUID, so that another one can be created on the namespace.
    pub fn erase(&self, uuid: [u8; 16]) -> io::Result<()> {
        let first = self.first()?;
        let bare = Label::claimed(&first).map(|label| label.uuid);
        let found = bare.or_else(|_| Superblock::claimed(&first).map(|found| found.uuid))?;
        if found != uuid {
            return Err(another_store());
        }
        self.put_first(&Page::ZERO)
    }

    /// A store of all blocks, without a label.
    #[must_use]
    pub fn raw(self) -> RemoteSectorStore {
        let sector_count = self.block_count;
        RemoteSectorStore::over(self, 0, sector_count)
    }
}

fn another_store() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the device holds another store")
}

/// Sectors with metadata, in place, without freshness.
#[derive(Debug)]
pub struct RemoteSectorStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    blocks: RemoteBlocks,
    /// Number of blocks in front of the sectors.
    first: u64,
    sector_count: u64,
    /// Shared with operations in flight, which must not keep the link alive.
    counters: Arc<StoreCounters>,
}

impl RemoteSectorStore {
    /// Writes the label of a new store. The data of the first block must be zeros: anything else
    /// may be somebody's. The sectors keep their contents: the caller must fill them.
    pub fn create(
        blocks: RemoteBlocks,
        uuid: [u8; 16],
        key: &Secret,
        sector_count: u64,
    ) -> io::Result<Self> {
        if blocks.first()? != Page::ZERO {
            let detail = "the device holds something: its first 4096 bytes are not zeros";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, detail));
        }
        check_size(&blocks, sector_count)?;
        let label = Label { uuid, seed: random()?, sector_count };
        blocks.put_first(&label.encode(&Authority::Secret(key)))?;
        Ok(Self::over(blocks, LABEL_BLOCKS, sector_count))
    }

    /// Opens the store with this UUID; its label must have been made with `key`.
    pub fn open(blocks: RemoteBlocks, uuid: [u8; 16], key: &Secret) -> io::Result<Self> {
        let first = blocks.first()?;
        if Label::claimed(&first)?.uuid != uuid {
            return Err(another_store());
        }
        let label = Label::decode(&first, &Authority::Secret(key))?;
        check_size(&blocks, label.sector_count)?;
        Ok(Self::over(blocks, LABEL_BLOCKS, label.sector_count))
    }

    fn over(blocks: RemoteBlocks, first: u64, sector_count: u64) -> Self {
        let shared = Shared { blocks, first, sector_count, counters: Arc::default() };
        Self { shared: Arc::new(shared) }
    }
}

fn check_size(blocks: &RemoteBlocks, sector_count: u64) -> io::Result<()> {
    let (found, needed) = (blocks.block_count, sector_count.saturating_add(LABEL_BLOCKS));
    if found < needed {
        let detail =
            format!("the device has {found} blocks of 4160 bytes, the store takes {needed}");
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}

impl BlockStore for RemoteSectorStore {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.sector_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let outbox = Arc::new(Outbox { done: Mutex::default(), event: event()? });
        Ok(Box::new(RemoteChannel { shared: Arc::clone(&self.shared), outbox, in_flight: 0 }))
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.by_name()
    }
}

/// Where a channel finds its completed operations.
#[derive(Debug)]
struct Outbox {
    done: Mutex<Vec<StoreDone>>,
    event: Arc<OwnedFd>,
}

impl Outbox {
    fn done(&self) -> MutexGuard<'_, Vec<StoreDone>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, ticket: u64, result: io::Result<()>, request: StoreRequest) {
        self.done().push(StoreDone { ticket, result, buffer: request.into_buffer() });
        signal(&self.event);
    }
}

struct RemoteChannel {
    shared: Arc<Shared>,
    outbox: Arc<Outbox>,
    in_flight: usize,
}

impl StoreChannel for RemoteChannel {
    fn submit(&mut self, ticket: u64, mut request: StoreRequest) {
        self.in_flight += 1;
        if let Err(error) = request.check(BLOCK_BYTES, self.shared.sector_count) {
            self.outbox.put(ticket, Err(error), request);
            return;
        }
        if let StoreRequest::Read { lba, .. } | StoreRequest::Write { lba, .. } = &mut request {
            *lba += self.shared.first;
        }
        let outbox = Arc::clone(&self.outbox);
        let counters = Arc::clone(&self.shared.counters);
        let reply = move |request: StoreRequest, result: io::Result<()>| {
            counters.ended(&request, &result);
            outbox.put(ticket, result, request);
        };
        self.shared.blocks.link.give(request, Box::new(reply));
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        clear(&self.outbox.event);
        let mut found = self.outbox.done();
        self.in_flight -= found.len();
        done.append(&mut found);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.outbox.event.as_fd())
    }
}

#[cfg(test)]
#[path = "remote_sectors_tests.rs"]
mod tests;
