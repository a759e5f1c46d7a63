//! Sealed 4160-byte blocks on pages without metadata (a sparse file, a block device, a namespace of
//! somebody else's), out of place: the data in slots, the metadata in a table kept by `sealed_map`.
//!
//! A block's data is copied once each way, between the caller's 4160-byte blocks and pages that
//! direct I/O accepts. A write that isn't durable ends when its data has reached the device; what
//! was not flushed is lost when the process is killed, as in any volatile write cache. Dropping the
//! store flushes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use sealane_proto::aead::Secret;

use super::super::store::{
    BLOCK_BYTES, BlockStore, DATA_BYTES, METADATA_BYTES, StoreChannel, StoreCounters, StoreDone,
    StoreRequest,
};
use super::device::{Device, IoQueue, Piece};
use super::journal::{Journal, Mailbox, Requests};
use super::layout::{Authority, Entry, Geometry, Superblock};
use super::pages::{BlockFile, DeviceFile, Page, random};
use super::recovery;
use super::ring::{Ended, IO_PAGES_MAX, Io, copy_error, event, hush, tell};
use super::sealed_map::SealedMap;

/// Name of the flush that writes wait for which found no slot.
const ROOM: u64 = u64::MAX;

#[derive(Debug)]
struct Shared {
    device: Arc<dyn Device>,
    map: Arc<SealedMap>,
    counters: StoreCounters,
}

/// A file of sealed blocks.
#[derive(Debug)]
pub struct SealedFileStore {
    shared: Arc<Shared>,
    journal: Journal,
}

impl SealedFileStore {
    /// Lays out an empty store in a sparse file, which must not exist, or on a block device,
    /// whose contents are lost.
    pub fn create(path: &Path, block_count: u64) -> io::Result<Self> {
        let mut uuid: [u8; 16] = random()?;
        // RFC 9562: version 4, variant 10.
        uuid[6] = uuid[6] & 0x0F | 0x40;
        uuid[8] = uuid[8] & 0x3F | 0x80;
        let page_count = Geometry::new(block_count).page_count();
        let device = Arc::new(DeviceFile::create(path, page_count)?);
        Self::lay_out(device, uuid, &Authority::Device, block_count)
    }

    /// Opens a store and brings it to the state that its last flush, at least, left.
    pub fn open(path: &Path) -> io::Result<Self> {
        let first = DeviceFile::open(path, 1)?;
        let (superblock, checker) = recovery::superblock(&first, &Authority::Device)?;
        let device = Arc::new(DeviceFile::open(path, superblock.geometry.page_count())?);
        let file = Arc::clone(&device) as Arc<dyn BlockFile>;
        let map = SealedMap::open(file, superblock.geometry, checker)?;
        Self::start(device, map)
    }

    /// Lays out an empty store, authenticated under `key`, on a device of which the first page must
    /// be zeros: anything else may be somebody's data.
    pub fn create_on(
        device: Arc<dyn Device>,
        uuid: [u8; 16],
        key: &Secret,
        block_count: u64,
    ) -> io::Result<Self> {
        let mut first = [Page::ZERO];
        device.read(0, &mut first)?;
        if first != [Page::ZERO] {
            let detail = "the device holds something: its first 4096 bytes are not zeros";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, detail));
        }
        Self::lay_out(device, uuid, &Authority::Secret(key), block_count)
    }

    /// Opens the store of that name on a device, made by who had `key`.
    pub fn open_on(device: Arc<dyn Device>, uuid: [u8; 16], key: &Secret) -> io::Result<Self> {
        if recovery::claimed(&*device)?.uuid != uuid {
            let detail = "the device holds another store";
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        let (superblock, checker) = recovery::superblock(&*device, &Authority::Secret(key))?;
        check_size(&*device, &superblock.geometry)?;
        let file = Arc::clone(&device) as Arc<dyn BlockFile>;
        let map = SealedMap::open(file, superblock.geometry, checker)?;
        Self::start(device, map)
    }

    /// Takes the store of that name off a device, so that another one can be laid out; no key is
    /// needed to.
    pub fn erase_on(device: &dyn Device, uuid: [u8; 16]) -> io::Result<()> {
        if recovery::claimed(device)?.uuid != uuid {
            let detail = "the device holds another store";
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        device.write(0, &[Page::ZERO])?;
        device.sync()
    }

    fn lay_out(
        device: Arc<dyn Device>,
        uuid: [u8; 16],
        authority: &Authority<'_>,
        block_count: u64,
    ) -> io::Result<Self> {
        let superblock = Superblock { uuid, seed: random()?, geometry: Geometry::new(block_count) };
        check_size(&*device, &superblock.geometry)?;
        let file = Arc::clone(&device) as Arc<dyn BlockFile>;
        let map = SealedMap::create(file, &superblock, authority)?;
        Self::start(device, map)
    }

    fn start(device: Arc<dyn Device>, map: SealedMap) -> io::Result<Self> {
        let map = Arc::new(map);
        let journal = Journal::start(Arc::clone(&map))?;
        let shared = Shared { device, map, counters: StoreCounters::default() };
        Ok(Self { shared: Arc::new(shared), journal })
    }
}

fn check_size(device: &dyn Device, geometry: &Geometry) -> io::Result<()> {
    let (found, needed) = (device.page_count(), geometry.page_count());
    if found < needed {
        let detail =
            format!("the device has {found} pages of 4096 bytes, the store takes {needed}");
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}

impl BlockStore for SealedFileStore {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.map.geometry().block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let event = event()?;
        Ok(Box::new(SealedChannel {
            ring: Arc::clone(&self.shared.device).queue(Arc::clone(&event))?,
            shared: Arc::clone(&self.shared),
            requests: Arc::clone(self.journal.requests()),
            mailbox: Arc::new(Mailbox::new(Arc::clone(&event))),
            event,
            operations: HashMap::new(),
            waiting: VecDeque::new(),
            is_room_wanted: false,
            next: 0,
            done: Vec::new(),
        }))
    }

    fn scan(&self, visit: &mut dyn FnMut(u64, &[u8; METADATA_BYTES])) -> io::Result<()> {
        self.shared.map.scan(visit);
        Ok(())
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.by_name()
    }
}

/// An operation and what is left of it.
struct Operation {
    ticket: u64,
    request: StoreRequest,
    /// Of the blocks read, or of those being written.
    entries: Vec<Entry>,
    pieces: usize,
    result: io::Result<()>,
}

/// A run of blocks in consecutive slots: the first, how many, and the first slot.
type Run = (usize, usize, u64);

struct SealedChannel {
    ring: Box<dyn IoQueue>,
    shared: Arc<Shared>,
    requests: Arc<Requests>,
    mailbox: Arc<Mailbox>,
    event: Arc<OwnedFd>,
    operations: HashMap<u64, Operation>,
    /// Writes and deallocations for which there is no room before a flush; in order.
    waiting: VecDeque<(u64, StoreRequest)>,
    is_room_wanted: bool,
    next: u64,
    done: Vec<StoreDone>,
}

/// The runs of entries that have slots.
fn runs(entries: &[Entry]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let Some(slot) = entry.slot else { continue };
        match runs.last_mut() {
            Some((first, count, start))
                if *first + *count == index
                    && *start + *count as u64 == slot
                    && *count < IO_PAGES_MAX =>
            {
                *count += 1;
            }
            _ => runs.push((index, 1, slot)),
        }
    }
    runs
}

impl SealedChannel {
    fn start_read(&mut self, ticket: u64, lba: u64, mut buffer: Vec<u8>) {
        let count = buffer.len() / BLOCK_BYTES;
        let entries = self.shared.map.entries(lba, count as u64);
        for (block, entry) in buffer.chunks_exact_mut(BLOCK_BYTES).zip(&entries) {
            if entry.slot.is_none() {
                block.fill(0);
            }
        }
        let runs = runs(&entries);
        let request = StoreRequest::Read { lba, buffer };
        self.start(ticket, request, entries, runs, |_, _, pages| pages);
    }

    fn start_write(&mut self, ticket: u64, request: StoreRequest, entries: Vec<Entry>) {
        let runs = runs(&entries);
        self.start(ticket, request, entries, runs, |request, first, mut pages| {
            if let StoreRequest::Write { buffer, .. } = request {
                let blocks = buffer.chunks_exact(BLOCK_BYTES).skip(first);
                for (page, block) in pages.iter_mut().zip(blocks) {
                    page.0.copy_from_slice(&block[..DATA_BYTES]);
                }
            }
            pages
        });
    }

    fn start(
        &mut self,
        ticket: u64,
        request: StoreRequest,
        entries: Vec<Entry>,
        runs: Vec<Run>,
        fill: impl Fn(&StoreRequest, usize, Vec<Page>) -> Vec<Page>,
    ) {
        let id = self.next;
        self.next += 1;
        let is_write = matches!(request, StoreRequest::Write { .. });
        let pieces = runs.len();
        for (first, count, slot) in runs {
            let pages = fill(&request, first, self.ring.buffer(count));
            let page = self.shared.map.geometry().slot(slot);
            let io = if is_write { Io::Write(page, pages, false) } else { Io::Read(page, pages) };
            self.ring.push(Piece { operation: id, first }, io);
        }
        let operation = Operation { ticket, request, entries, pieces, result: Ok(()) };
        if pieces == 0 {
            self.end(operation);
        } else {
            self.operations.insert(id, operation);
        }
    }

    /// Tries a write or deallocation. Gives it back if a flush must come first.
    fn try_change(&mut self, ticket: u64, request: StoreRequest) -> Option<StoreRequest> {
        let map = &self.shared.map;
        let changed = match &request {
            StoreRequest::Write { buffer, .. } => match map.place(buffer) {
                Ok(Some(entries)) => {
                    self.start_write(ticket, request, entries);
                    return None;
                }
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            },
            StoreRequest::Deallocate { lba, blocks } => map.deallocate(*lba, *blocks),
            StoreRequest::Read { .. } | StoreRequest::Flush => Ok(true),
        };
        match changed {
            Ok(false) => return Some(request),
            Ok(true) => self.finish(ticket, request, Ok(())),
            Err(error) => self.finish(ticket, request, Err(error)),
        }
        None
    }

    fn retry_waiting(&mut self) {
        while let Some((ticket, request)) = self.waiting.pop_front() {
            if let Some(request) = self.try_change(ticket, request) {
                self.waiting.push_front((ticket, request));
                self.want_room();
                return;
            }
        }
    }

    fn want_room(&mut self) {
        if !self.is_room_wanted {
            self.is_room_wanted = true;
            self.requests.flush(&self.mailbox, ROOM);
        }
    }

    fn start_flush(&mut self, ticket: u64, request: StoreRequest) {
        let operation =
            Operation { ticket, request, entries: Vec::new(), pieces: 1, result: Ok(()) };
        self.await_flush(operation);
    }

    fn await_flush(&mut self, operation: Operation) {
        let id = self.next;
        self.next += 1;
        self.operations.insert(id, operation);
        self.requests.flush(&self.mailbox, id);
    }

    fn ended(&mut self, ended: Ended<Piece>) {
        let Ended { tag: Piece { operation: id, first }, io, result } = ended;
        let Some(operation) = self.operations.get_mut(&id) else { return };
        operation.pieces -= 1;
        if let Err(error) = result {
            operation.result = Err(error);
        }
        if operation.result.is_ok()
            && let Io::Read(_, pages) = &io
            && let StoreRequest::Read { lba, buffer } = &mut operation.request
        {
            let blocks = buffer.chunks_exact_mut(BLOCK_BYTES).zip(&operation.entries);
            for (index, ((block, entry), page)) in (0..).zip(blocks.skip(first).zip(pages)) {
                let (data, metadata) = block.split_at_mut(DATA_BYTES);
                data.copy_from_slice(&page.0);
                metadata.copy_from_slice(&entry.metadata);
                if !self.shared.map.is_whole(entry, block) {
                    let lba = *lba + first as u64 + index;
                    let detail = format!("block {lba} is not what was written");
                    operation.result = Err(io::Error::new(io::ErrorKind::InvalidData, detail));
                }
            }
        }
        if operation.pieces == 0
            && let Some(operation) = self.operations.remove(&id)
        {
            self.end(operation);
        }
        if let Io::Read(_, pages) | Io::Write(_, pages, _) = io {
            self.ring.keep(pages);
        }
    }

    /// All of an operation's I/O has ended.
    fn end(&mut self, mut operation: Operation) {
        if let StoreRequest::Write { lba, durable, .. } = &operation.request {
            let map = &self.shared.map;
            if operation.result.is_ok() {
                operation.result = map.commit(*lba, &operation.entries);
            } else {
                map.abandon(&operation.entries);
            }
            if *durable && operation.result.is_ok() {
                self.await_flush(operation);
                return;
            }
            if map.is_flush_due() {
                self.requests.flush_in_background();
            }
        }
        let Operation { ticket, request, result, .. } = operation;
        self.finish(ticket, request, result);
    }

    fn finish(&mut self, ticket: u64, request: StoreRequest, result: io::Result<()>) {
        let counters = &self.shared.counters;
        match (&request, &result) {
            (_, Err(_)) => counters.failed(),
            (StoreRequest::Read { buffer, .. }, _) => counters.read(buffer.len()),
            (StoreRequest::Write { buffer, .. }, _) => counters.written(buffer.len()),
            (StoreRequest::Flush, _) => counters.flushed(),
            (StoreRequest::Deallocate { .. }, _) => counters.deallocated(),
        }
        if self.done.is_empty() {
            tell(&self.event);
        }
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }

    fn collect_flushes(&mut self) {
        for (id, result) in self.mailbox.take() {
            if id == ROOM {
                // If it failed, whoever waits learns it from the map.
                self.is_room_wanted = false;
                self.retry_waiting();
            } else if let Some(Operation { ticket, request, .. }) = self.operations.remove(&id) {
                self.finish(ticket, request, result);
            }
        }
    }
}

impl StoreChannel for SealedChannel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        if let Err(error) = request.check(BLOCK_BYTES, self.shared.map.geometry().block_count) {
            self.finish(ticket, request, Err(error));
            return;
        }
        match request {
            StoreRequest::Read { lba, buffer } => self.start_read(ticket, lba, buffer),
            StoreRequest::Flush => self.start_flush(ticket, request),
            StoreRequest::Write { .. } | StoreRequest::Deallocate { .. } => {
                if !self.waiting.is_empty() {
                    self.waiting.push_back((ticket, request));
                } else if let Some(request) = self.try_change(ticket, request) {
                    self.waiting.push_back((ticket, request));
                    self.want_room();
                }
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        hush(&self.event);
        self.collect_flushes();
        let mut ended = Vec::new();
        let turned = self.ring.turn(&mut ended);
        for ended in ended {
            self.ended(ended);
        }
        if let Err(error) = turned {
            // Writes keep their slots: the kernel may have some of their data still to write.
            for (_, operation) in std::mem::take(&mut self.operations) {
                self.finish(operation.ticket, operation.request, Err(copy_error(&error)));
            }
        }
        done.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.operations.len() + self.waiting.len() + self.done.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

impl Drop for SealedChannel {
    fn drop(&mut self) {
        if self.ring.drain() {
            // What was written but not noted is given up; what waits for a flush has no pieces.
            let unfinished = self.operations.values().filter(|operation| operation.pieces > 0);
            for operation in unfinished {
                if let StoreRequest::Write { .. } = operation.request {
                    self.shared.map.abandon(&operation.entries);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::super::scratch::Scratch;
    use super::*;

    #[test]
    fn behaves_as_a_store() {
        let scratch = Scratch::new();
        conformance::check(&SealedFileStore::create(&scratch.file(), 1000).expect("store"));
    }

    fn write(channel: &mut dyn StoreChannel, lba: u64, count: u64, version: u64) {
        let buffer = conformance::blocks(BLOCK_BYTES, lba, count, version);
        let write = StoreRequest::Write { lba, buffer, durable: false };
        conformance::execute(channel, write).expect("write");
    }

    #[test]
    fn keeps_what_was_flushed_from_one_opening_to_the_next() {
        let scratch = Scratch::new();
        let store = SealedFileStore::create(&scratch.file(), 1000).expect("store");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 100, 300, 1);
        conformance::execute(&mut *channel, StoreRequest::Flush).expect("flush");
        drop((channel, store));
        let store = SealedFileStore::open(&scratch.file()).expect("store");
        let mut written = 0;
        store.scan(&mut |_, _| written += 1).expect("scan");
        assert_eq!((written, store.block_count()), (300, 1000));
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 100, 300);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 100, 300, 1));
    }

    #[test]
    fn an_orderly_end_loses_nothing() {
        let scratch = Scratch::new();
        let store = SealedFileStore::create(&scratch.file(), 1000).expect("store");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 100, 30, 1);
        drop((channel, store));
        let store = SealedFileStore::open(&scratch.file()).expect("store");
        let mut channel = store.open().expect("channel");
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 100, 30);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 100, 30, 1));
    }

    #[test]
    fn overwriting_more_than_the_spare_slots_waits_for_flushes() {
        let scratch = Scratch::new();
        let store = SealedFileStore::create(&scratch.file(), 500).expect("store");
        let mut channel = store.open().expect("channel");
        let rounds = 20;
        for round in 0..rounds {
            for lba in (0..500).step_by(50) {
                let buffer = conformance::blocks(BLOCK_BYTES, lba, 50, round);
                channel.submit(lba, StoreRequest::Write { lba, buffer, durable: false });
            }
            let ends = conformance::wait(&mut *channel, 10);
            assert!(ends.iter().all(|end| end.result.is_ok()));
        }
        let found = conformance::read(&mut *channel, BLOCK_BYTES, 0, 500);
        assert_eq!(found, conformance::blocks(BLOCK_BYTES, 0, 500, rounds - 1));
    }

    #[test]
    fn a_dropped_channel_gives_its_slots_back() {
        let scratch = Scratch::new();
        let store = SealedFileStore::create(&scratch.file(), 100).expect("store");
        let free = || store.shared.map.free_slots();
        let before = free();
        let mut channel = store.open().expect("channel");
        for lba in 0..100 {
            let buffer = conformance::block(BLOCK_BYTES, lba, 1);
            channel.submit(lba, StoreRequest::Write { lba, buffer, durable: false });
        }
        assert_eq!(free(), before - 100);
        drop(channel);
        assert_eq!(free(), before);
    }

    #[test]
    fn a_changed_byte_in_a_slot_is_an_error_not_data() {
        let scratch = Scratch::new();
        let store = SealedFileStore::create(&scratch.file(), 100).expect("store");
        let mut channel = store.open().expect("channel");
        write(&mut *channel, 7, 1, 1);
        let map = &store.shared.map;
        let slot = map.entries(7, 1)[0].slot.expect("slot");
        let mut page = [Page::ZERO];
        let place = map.geometry().slot(slot);
        store.shared.device.read(place, &mut page).expect("read");
        page[0].0[1000] ^= 1;
        store.shared.device.write(place, &page).expect("write");
        let request = StoreRequest::Read { lba: 7, buffer: vec![0; BLOCK_BYTES] };
        let error = conformance::execute(&mut *channel, request).expect_err("damaged");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_is_no_store_is_refused() {
        let scratch = Scratch::new();
        std::fs::write(scratch.file(), vec![7; 8192]).expect("file");
        let error = SealedFileStore::open(&scratch.file()).expect_err("no store");
        assert!(error.to_string().contains("not a Sealane store"), "{error}");
        let store = SealedFileStore::create(&scratch.file(), 10);
        assert_eq!(store.expect_err("it exists").kind(), io::ErrorKind::AlreadyExists);
    }
}
