//! Operations of one queue thread on a sealed file store.
//!
//! A read looks its blocks up in the changes pending in memory, then in leaf pages, which it
//! fetches on its own ring if they aren't cached, and then reads the data. Data is copied once in
//! each direction, between the caller's 4160-byte blocks and pages that direct I/O accepts. Nothing
//! here blocks.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use sealane_proto::freshness::pending::Known;

use super::super::store::{BLOCK_BYTES, DATA_BYTES, StoreChannel, StoreDone, StoreRequest};
use super::changes::{ChangeChannel, Ends, ROOM, Waiting};
use super::device::{IoQueue, Piece};
use super::fresh::failure::{Refusal, copy_error};
use super::fresh::geometry::Geometry;
use super::fresh::journal::{Mailbox, Requests};
use super::fresh::leaves::{Checked, Fetch};
use super::fresh::map::{check_orphans, take_leaf};
use super::fresh::placed::{Placed, PlacedEntry};
use super::fresh_store::Shared;
use super::pages::{IO_PAGES_MAX, Page};
use super::ring::{Ended, Io, clear, event};
use super::sealed_file::Slots;

/// The current stage of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its leaf pages are being fetched; a piece's `first` is the index of a fetch.
    Looking,
    /// Its data is being read or written; a piece's `first` is the index of a block.
    Moving,
    /// It waits for a flush.
    Flushing,
}

/// An operation in progress.
struct Operation {
    ticket: u64,
    request: StoreRequest,
    /// First block.
    lba: u64,
    stage: Stage,
    /// The entries of the blocks that are read or written; `Absent` until the leaf page has been
    /// read.
    entries: Vec<Known<PlacedEntry>>,
    fetches: Vec<Fetch>,
    pieces: usize,
    result: io::Result<()>,
}

/// A run of blocks in consecutive slots: index of the first block, number of blocks, page of the
/// first slot.
pub(super) type Run = (usize, usize, u64);

/// A channel.
pub(super) struct SealedChannel {
    ring: Box<dyn IoQueue>,
    shared: Arc<Shared<Slots>>,
    requests: Arc<Requests>,
    mailbox: Arc<Mailbox>,
    event: Arc<OwnedFd>,
    operations: HashMap<u64, Operation>,
    waiting: Waiting,
    next: u64,
    ends: Ends,
}

/// Groups entries with consecutive slots into runs.
pub(super) fn runs(entries: &[Known<PlacedEntry>], geometry: &Geometry) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let Known::Entry(PlacedEntry { slot, .. }) = *entry else { continue };
        let place = geometry.slot(slot);
        match runs.last_mut() {
            Some((first, count, start))
                if *first + *count == index
                    && *start + *count as u64 == place
                    && *count < IO_PAGES_MAX =>
            {
                *count += 1;
            }
            _ => runs.push((index, 1, place)),
        }
    }
    runs
}

fn placed(entries: &[Known<PlacedEntry>]) -> impl Iterator<Item = &PlacedEntry> {
    entries.iter().filter_map(|known| match known {
        Known::Entry(entry) => Some(entry),
        Known::Void | Known::Absent | Known::Orphaned => None,
    })
}

impl SealedChannel {
    /// Creates a channel that requests flushes and room through `requests`.
    pub fn new(shared: Arc<Shared<Slots>>, requests: &Arc<Requests>) -> io::Result<Self> {
        let event = event()?;
        Ok(Self {
            ring: Arc::clone(&shared.place.device).queue(Arc::clone(&event))?,
            shared,
            requests: Arc::clone(requests),
            mailbox: Arc::new(Mailbox::new(Arc::clone(&event))),
            ends: Ends::new(Arc::clone(&event)),
            event,
            operations: HashMap::new(),
            waiting: Waiting::default(),
            next: 0,
        })
    }

    fn add(&mut self, operation: Operation) -> u64 {
        let id = self.next;
        self.next += 1;
        self.operations.insert(id, operation);
        id
    }

    // Looking blocks up.

    fn start_read(&mut self, ticket: u64, request: StoreRequest, lba: u64, blocks: u64) {
        let entries = self.shared.map.current(lba, blocks);
        let mut operation = Operation {
            ticket,
            request,
            lba,
            stage: Stage::Looking,
            entries,
            fetches: Vec::new(),
            pieces: 0,
            result: Ok(()),
        };
        operation.fetches = self.shared.map.look_up(&mut operation.entries, lba);
        self.go_on_looking(operation);
    }

    /// Fetches missing leaf pages; without any, continues with the operation.
    fn go_on_looking(&mut self, mut operation: Operation) {
        let fetches: Vec<_> = operation.fetches.iter().map(|fetch| fetch.place).collect();
        operation.pieces = fetches.len();
        if fetches.is_empty() {
            return self.looked_up(operation);
        }
        self.shared.map.count_leaf_reads(fetches.len() as u64);
        let id = self.add(operation);
        for (first, place) in fetches.into_iter().enumerate() {
            let pages = self.ring.buffer(1);
            self.ring.push(Piece { operation: id, first }, Io::Read(place, pages));
        }
    }

    /// Handles a leaf page that was read.
    fn leaf_came(&self, operation: &mut Operation, first: usize, page: &Page) {
        let Some(fetch) = operation.fetches.get(first).copied() else { return };
        match self.shared.map.leaves().check(&fetch, &page.0) {
            Ok(Checked::Right(page)) => {
                take_leaf::<Placed>(&mut operation.entries, operation.lba, fetch.leaf, &page);
            }
            // Looked up again once all leaf pages have been read.
            Ok(Checked::Changed) => {}
            Err(refusal) => operation.result = Err(refusal.into()),
        }
    }

    /// Continues once all requested leaf pages have been read.
    fn leaves_came(&mut self, mut operation: Operation) {
        if operation.result.is_ok() {
            let lba = operation.lba;
            operation.fetches = self.shared.map.look_up(&mut operation.entries, lba);
            self.go_on_looking(operation);
        } else {
            self.finish(operation);
        }
    }

    /// Continues once all entries are known.
    fn looked_up(&mut self, mut operation: Operation) {
        operation.result = check_orphans(&operation.entries, operation.lba);
        if operation.result.is_err() {
            return self.finish(operation);
        }
        if let StoreRequest::Read { buffer, .. } = &mut operation.request {
            for (block, known) in buffer.chunks_exact_mut(BLOCK_BYTES).zip(&operation.entries) {
                if !matches!(known, Known::Entry(_)) {
                    block.fill(0);
                }
            }
        }
        self.move_data(operation);
    }

    // Moving data.

    fn start_write(&mut self, ticket: u64, request: StoreRequest, entries: &[PlacedEntry]) {
        let operation = Operation {
            ticket,
            lba: 0,
            request,
            stage: Stage::Moving,
            entries: entries.iter().map(|entry| Known::Entry(*entry)).collect(),
            fetches: Vec::new(),
            pieces: 0,
            result: Ok(()),
        };
        self.move_data(operation);
    }

    fn move_data(&mut self, mut operation: Operation) {
        let runs = runs(&operation.entries, self.shared.map.geometry());
        operation.stage = Stage::Moving;
        operation.pieces = runs.len();
        if runs.is_empty() {
            return self.end(operation);
        }
        let id = self.next;
        self.next += 1;
        for (first, count, place) in runs {
            let mut pages = self.ring.buffer(count);
            let io = if let StoreRequest::Write { buffer, .. } = &operation.request {
                let blocks = buffer.chunks_exact(BLOCK_BYTES).skip(first);
                for (page, block) in pages.iter_mut().zip(blocks) {
                    page.0.copy_from_slice(&block[..DATA_BYTES]);
                }
                Io::Write(place, pages, false)
            } else {
                Io::Read(place, pages)
            };
            self.ring.push(Piece { operation: id, first }, io);
        }
        self.operations.insert(id, operation);
    }

    /// Checks data that was read and copies it to the caller's buffer.
    fn data_came(&self, operation: &mut Operation, first: usize, pages: &[Page]) {
        let StoreRequest::Read { lba, buffer } = &mut operation.request else { return };
        let blocks = buffer.chunks_exact_mut(BLOCK_BYTES).zip(&operation.entries);
        for (lba, ((block, known), page)) in
            (*lba + first as u64..).zip(blocks.skip(first).zip(pages))
        {
            let Known::Entry(entry) = known else { continue };
            let (data, metadata) = block.split_at_mut(DATA_BYTES);
            data.copy_from_slice(&page.0);
            metadata.copy_from_slice(&entry.metadata());
            if !self.shared.map.is_whole(entry, block) {
                operation.result = Err(Refusal::Stale(lba).into());
            }
        }
    }

    fn ended(&mut self, ended: Ended<Piece>) {
        let Ended { tag: Piece { operation: id, first }, io, result } = ended;
        let Some(mut operation) = self.operations.remove(&id) else { return };
        operation.pieces -= 1;
        if let Err(error) = result {
            operation.result = Err(error);
        }
        if operation.result.is_ok()
            && let Io::Read(_, pages) = &io
        {
            match operation.stage {
                Stage::Looking => self.leaf_came(&mut operation, first, &pages[0]),
                _ => self.data_came(&mut operation, first, pages),
            }
        }
        if let Io::Read(_, pages) | Io::Write(_, pages, _) = io {
            self.ring.keep(pages);
        }
        match (operation.pieces, operation.stage) {
            (0, Stage::Looking) => self.leaves_came(operation),
            (0, _) => self.end(operation),
            _ => drop(self.operations.insert(id, operation)),
        }
    }

    /// Completes an operation whose I/O has ended.
    fn end(&mut self, mut operation: Operation) {
        if let StoreRequest::Write { lba, durable, .. } = &operation.request {
            let map = &self.shared.map;
            let entries = placed(&operation.entries);
            if operation.result.is_ok() {
                operation.result = map.commit(*lba, entries);
            } else {
                map.abandon(entries);
            }
            if *durable && operation.result.is_ok() {
                self.await_flush(operation);
                return;
            }
            if map.is_write_back_due() {
                self.requests.write_back();
            }
        }
        self.finish(operation);
        if self.waiting.is_stuck() {
            self.retry_waiting();
        }
    }

    // Flushes.

    fn start_flush(&mut self, ticket: u64, request: StoreRequest) {
        self.await_flush(Operation {
            ticket,
            request,
            lba: 0,
            stage: Stage::Flushing,
            entries: Vec::new(),
            fetches: Vec::new(),
            pieces: 0,
            result: Ok(()),
        });
    }

    fn await_flush(&mut self, operation: Operation) {
        let id = self.add(Operation { stage: Stage::Flushing, ..operation });
        self.requests.flush(&self.mailbox, id);
    }

    fn finish(&mut self, operation: Operation) {
        let Operation { ticket, request, result, .. } = operation;
        self.complete(ticket, request, result);
    }

    fn collect_mail(&mut self) {
        for (id, result) in self.mailbox.take() {
            if id == ROOM {
                self.room_came(&result);
            } else if let Some(operation) = self.operations.remove(&id) {
                self.finish(Operation { result, ..operation });
            }
        }
    }
}

impl ChangeChannel for SealedChannel {
    fn waiting(&mut self) -> &mut Waiting {
        &mut self.waiting
    }

    fn room(&self) -> (&Arc<Requests>, &Arc<Mailbox>) {
        (&self.requests, &self.mailbox)
    }

    fn try_change(&mut self, ticket: u64, request: StoreRequest) -> Option<StoreRequest> {
        let map = &self.shared.map;
        let changed = match &request {
            StoreRequest::Write { buffer, .. } => match map.place(buffer) {
                Ok(Some(entries)) => {
                    self.start_write(ticket, request, &entries);
                    return None;
                }
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            },
            StoreRequest::Deallocate { lba, blocks } => map.deallocate(*lba, *blocks),
            _ => Ok(true),
        };
        self.tried(ticket, request, changed)
    }

    fn complete(&mut self, ticket: u64, request: StoreRequest, result: io::Result<()>) {
        self.ends.push(&self.shared.counters, ticket, request, result);
    }

    fn gives_room_back(&self) -> bool {
        self.operations.values().any(|operation| operation.stage == Stage::Moving)
    }
}

impl StoreChannel for SealedChannel {
    fn submit(&mut self, ticket: u64, request: StoreRequest) {
        if let Err(error) = request.check(BLOCK_BYTES, self.shared.map.geometry().block_count) {
            self.complete(ticket, request, Err(error));
            return;
        }
        match request {
            StoreRequest::Read { lba, ref buffer } => {
                let blocks = (buffer.len() / BLOCK_BYTES) as u64;
                self.start_read(ticket, request, lba, blocks);
            }
            StoreRequest::Flush => self.start_flush(ticket, request),
            StoreRequest::Write { .. } | StoreRequest::Deallocate { .. } => {
                self.change(ticket, request);
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        clear(&self.event);
        self.ends.begin_poll();
        self.collect_mail();
        // Reads whose entries were found start reading their data in the same call.
        let mut ended = Vec::new();
        let turned = loop {
            let turned = self.ring.turn(&mut ended);
            if ended.is_empty() || turned.is_err() {
                break turned;
            }
            for ended in ended.drain(..) {
                self.ended(ended);
            }
        };
        if let Err(error) = turned {
            // Writes keep their slots: the kernel may still write some of their data.
            for (_, operation) in std::mem::take(&mut self.operations) {
                self.finish(Operation { result: Err(copy_error(&error)), ..operation });
            }
        }
        self.ends.end_poll(done);
    }

    fn in_flight(&self) -> usize {
        self.operations.len() + self.waiting.len() + self.ends.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

impl Drop for SealedChannel {
    fn drop(&mut self) {
        if self.ring.drain() {
            // Free the slots of writes that were not committed.
            for operation in self.operations.values() {
                if let (StoreRequest::Write { .. }, Stage::Moving) =
                    (&operation.request, operation.stage)
                {
                    self.shared.map.abandon(placed(&operation.entries));
                }
            }
        }
    }
}
