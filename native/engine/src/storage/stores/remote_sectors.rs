//! Sealed blocks on a namespace of somebody else's target whose format is theirs: 4096 bytes of data
//! and 64 of metadata as one extended LBA, protection information off.
//!
//! A block changes as a whole, by the drive. A volume of mode `local` lies on the blocks through an
//! [`InPlaceStore`](super::in_place_store::InPlaceStore), which keeps them fresh. One of mode `off`
//! lies there bare, behind a label that says whose the namespace is (`docs/formats/stores.md` §2a): sector
//! *n* is block *n* + 1, nothing tells which version counts, and there is no unwritten state: who
//! lays it out fills it before it is used.

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
use super::ring::{event, hush, tell};

/// Blocks that a label takes.
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
            // A deallocated block reads as whatever the target likes.
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

/// The namespace, before it is known whose it is.
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
    /// Takes a connected socket whose Connect command succeeded, for a namespace of `block_count`
    /// blocks of 4160 bytes. `timeout` is how long one command may take.
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

    /// Takes the store of that name off the namespace, so that another one can be laid out.
    pub fn erase(&self, uuid: [u8; 16]) -> io::Result<()> {
        let first = self.first()?;
        let bare = Label::claimed(&first).map(|label| label.uuid);
        let found = bare.or_else(|_| Superblock::claimed(&first).map(|found| found.uuid))?;
        if found != uuid {
            return Err(another_store());
        }
        self.put_first(&Page::ZERO)
    }

    /// All blocks, as they are.
    #[must_use]
    pub fn raw(self) -> RemoteSectorStore {
        let sector_count = self.block_count;
        RemoteSectorStore::over(self, 0, sector_count)
    }
}

fn another_store() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the device holds another store")
}

/// Sectors with their metadata in place.
#[derive(Debug)]
pub struct RemoteSectorStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    blocks: RemoteBlocks,
    /// Blocks in front of the sectors.
    first: u64,
    sector_count: u64,
    /// Shared with operations on their way, which must not keep the link.
    counters: Arc<StoreCounters>,
}

impl RemoteSectorStore {
    /// Labels a namespace, of which the first block's data must be zeros: anything else may be
    /// somebody's. The sectors stay as they are: the caller fills them.
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

    /// Opens the store of that name, labelled by who had `key`.
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

/// Where a channel finds the ends of its operations.
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
        tell(&self.event);
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
        hush(&self.outbox.event);
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
