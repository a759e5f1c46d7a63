//! Operations of one queue thread on a store of sealed blocks in place.
//!
//! A read takes the IVs that its blocks must have from the changes pending in memory and from
//! cached leaf pages, and then reads the blocks. For a block that neither covers, a valid fast-path
//! MAC under its set's node shows that it is current; otherwise the leaf page is fetched. A write
//! waits until its announcement in the log is durable. Nothing here blocks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use sealane_proto::freshness::leaf::{Iv, Ivs, LeafFormat, LeafPage};
use sealane_proto::freshness::pending::Known;
use sealane_proto::link::Nanos;
use sealane_proto::sector::BLOCK_BYTES;

use super::super::store::{StoreChannel, StoreDone, StoreRequest};
use super::changes::{ChangeChannel, Ends, ROOM, Waiting};
use super::fresh::announcements::{Announcement, Begun};
use super::fresh::failure::{Refusal, copy_error};
use super::fresh::journal::{Mailbox, Requests};
use super::fresh::leaves::{Checked, Fetch};
use super::fresh::map::{Map, take_leaf};
use super::fresh_store::Shared;
use super::in_place_parts::Parts;
use super::in_place_store::InPlace;
use super::raw_pages::{wait_for_end, write_of};
use super::ring::event;
use super::write_window::WriteWindow;
use crate::clock;

/// Most writes to wait for before they are announced together: each announcement costs the device
/// one operation.
const GATHERED: usize = 16;
/// Most announcements of one channel in flight.
const ANNOUNCEMENTS_MAX: usize = 4;

/// What an operation waits for.
#[derive(Debug)]
enum Stage {
    /// Its blocks are being read.
    Reading,
    /// Leaf pages are being fetched for blocks that were read.
    Looking(Vec<Fetch>),
    /// Its write is being announced, or is announced and waits for the write window.
    Announcing,
    /// Its blocks are being written.
    Writing,
    /// It waits for a flush.
    Flushing,
}

/// An operation and what is known about its blocks.
#[derive(Debug)]
struct Operation {
    ticket: u64,
    request: StoreRequest,
    lba: u64,
    stage: Stage,
    /// For a read: the known IVs of its blocks.
    known: Vec<Known<Iv>>,
    /// For a write: the new IVs of its blocks.
    ivs: Arc<[Iv]>,
    result: io::Result<()>,
}

/// A channel.
pub(super) struct InPlaceChannel {
    raw: Box<dyn StoreChannel>,
    shared: Arc<Shared<InPlace>>,
    requests: Arc<Requests>,
    mailbox: Arc<Mailbox>,
    /// Readable when the channel's event or the raw channel's descriptor is.
    either: OwnedFd,
    operations: HashMap<u64, Operation>,
    /// Reads and writes whose blocks lie in two extents.
    parts: Parts,
    /// Leaf pages being fetched, by the raw channel's ticket: the operation's id, and which of its
    /// fetches.
    fetches: HashMap<u64, (u64, Fetch)>,
    /// Writes that wait for an announcement that has not begun.
    unannounced: Vec<u64>,
    /// Writes that wait for an announcement that has begun, by its id.
    announcements: HashMap<u64, Vec<u64>>,
    /// Announcements that this channel is writing, by the raw channel's ticket: their numbers, and
    /// when they were begun.
    announcing: HashMap<u64, (u64, Nanos)>,
    /// Announced writes that the write window has no room for.
    ready: VecDeque<u64>,
    /// Number of announced writes at the device; `window` limits it.
    writing: usize,
    window: WriteWindow,
    waiting: Waiting,
    next: u64,
    ends: Ends,
    raw_done: Vec<StoreDone>,
}

impl InPlaceChannel {
    /// Creates a channel that requests flushes, announcements and room through `requests`.
    pub fn new(shared: Arc<Shared<InPlace>>, requests: &Arc<Requests>) -> io::Result<Self> {
        let (raw, event) = (shared.place.raw.open()?, event()?);
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [Some(event.as_fd()), raw.as_fd()].into_iter().flatten() {
            epoll::add(&either, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            raw,
            shared,
            requests: Arc::clone(requests),
            mailbox: Arc::new(Mailbox::new(Arc::clone(&event))),
            ends: Ends::new(event),
            either,
            operations: HashMap::new(),
            parts: Parts::default(),
            fetches: HashMap::new(),
            unannounced: Vec::new(),
            announcements: HashMap::new(),
            announcing: HashMap::new(),
            ready: VecDeque::new(),
            writing: 0,
            window: WriteWindow::default(),
            waiting: Waiting::default(),
            next: 0,
            raw_done: Vec::new(),
        })
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Reads or writes blocks of the volume, translating their addresses.
    fn move_blocks(&mut self, id: u64, request: StoreRequest) {
        let geometry = self.shared.map.geometry();
        self.parts.submit(&mut *self.raw, geometry, id, request);
    }

    // Reads.

    fn start_read(&mut self, ticket: u64, request: StoreRequest, lba: u64, blocks: u64) {
        let mut known = self.shared.map.current(lba, blocks);
        // Leaf pages that are missing in memory are fetched after the blocks have been read.
        self.shared.map.look_up(&mut known, lba);
        let (stage, ivs) = (Stage::Reading, Arc::default());
        let mut operation = Operation { ticket, request, lba, stage, known, ivs, result: Ok(()) };
        if operation.known.iter().all(|known| *known == Known::Void) {
            if let StoreRequest::Read { buffer, .. } = &mut operation.request {
                buffer.fill(0);
            }
            return self.finish(operation);
        }
        let id = self.name();
        if let StoreRequest::Read { buffer, .. } = &mut operation.request {
            let buffer = std::mem::take(buffer);
            self.operations.insert(id, operation);
            self.move_blocks(id, StoreRequest::Read { lba, buffer });
        }
    }

    /// Handles blocks that have been read: fetches leaf pages only for those that nothing else
    /// shows to be current.
    fn blocks_came(&mut self, mut operation: Operation) {
        let fetches = self.shared.map.look_up(&mut operation.known, operation.lba);
        let StoreRequest::Read { buffer, .. } = &operation.request else { return };
        let blocks = buffer.as_chunks::<BLOCK_BYTES>().0;
        self.shared.map.take_vouched(&mut operation.known, operation.lba, blocks);
        let is_missing = |fetch: &Fetch| {
            let blocks = (operation.lba..).zip(&operation.known);
            let mut absent = blocks.filter(|(_, known)| **known == Known::Absent);
            absent.any(|(lba, _)| lba / Ivs::ENTRIES_PER_LEAF == fetch.leaf)
        };
        let fetches = fetches.into_iter().filter(is_missing).collect();
        self.fetch(operation, fetches);
    }

    /// Fetches leaf pages; without any, continues with the operation.
    fn fetch(&mut self, mut operation: Operation, fetches: Vec<Fetch>) {
        if fetches.is_empty() {
            return self.looked_up(operation);
        }
        self.shared.map.count_leaf_reads(fetches.len() as u64);
        let id = self.name();
        for fetch in &fetches {
            let ticket = self.name();
            self.fetches.insert(ticket, (id, *fetch));
            let read = StoreRequest::Read { lba: fetch.place, buffer: vec![0; BLOCK_BYTES] };
            self.raw.submit(ticket, read);
        }
        operation.stage = Stage::Looking(fetches);
        self.operations.insert(id, operation);
    }

    fn leaf_came(&mut self, id: u64, fetch: Fetch, done: StoreDone) {
        let Some(mut operation) = self.operations.remove(&id) else { return };
        let Stage::Looking(fetches) = &mut operation.stage else { return };
        fetches.retain(|other| *other != fetch);
        let is_last = fetches.is_empty();
        match done.result.and_then(|()| self.check_leaf(&fetch, &done.buffer)) {
            Ok(Some(page)) => {
                take_leaf::<Ivs>(&mut operation.known, operation.lba, fetch.leaf, &page);
            }
            // The page was rewritten in the meantime: look it up again once all fetches are done.
            Ok(None) => {}
            Err(error) => operation.result = Err(error),
        }
        if !is_last {
            self.operations.insert(id, operation);
        } else if operation.result.is_err() {
            self.finish(operation);
        } else {
            let fetches = self.shared.map.look_up(&mut operation.known, operation.lba);
            self.fetch(operation, fetches);
        }
    }

    fn check_leaf(&self, fetch: &Fetch, block: &[u8]) -> io::Result<Option<Arc<LeafPage>>> {
        let Some(page) = block.first_chunk() else {
            return Err(Refusal::StaleLeaf(fetch.leaf).into());
        };
        match self.shared.map.leaves().check(fetch, page)? {
            Checked::Right(page) => Ok(Some(page)),
            Checked::Changed => Ok(None),
        }
    }

    /// Completes a read once everything is known about its blocks: fails it if they are not the
    /// current ones.
    fn looked_up(&mut self, mut operation: Operation) {
        if let StoreRequest::Read { buffer, .. } = &mut operation.request {
            let blocks = buffer.as_chunks_mut::<BLOCK_BYTES>().0;
            operation.result = Map::check_blocks(&operation.known, operation.lba, blocks);
        }
        self.finish(operation);
    }

    // Changes.

    /// Announces waiting writes, many at once: they gather until they are half of all writes in
    /// progress, so that the device always has the other half to work on. The channel writes the
    /// announcement itself if it may write to the log now; otherwise the store's thread does.
    fn announce(&mut self) {
        let waiting = self.unannounced.len();
        if waiting == 0
            || self.announcing.len() == ANNOUNCEMENTS_MAX
            || waiting < self.worth_announcing()
        {
            return;
        }
        let (writes, name) = (std::mem::take(&mut self.unannounced), self.name());
        let lba = |id| self.operations.get(id).map(|operation| operation.lba);
        let lbas: Vec<u64> = writes.iter().filter_map(lba).collect();
        match self.shared.map.begin_announcement(&lbas, &self.mailbox, name) {
            Ok(Begun::InFlight(announcement)) => {
                self.announcements.insert(name, writes);
                let Announcement { number, place, pages, is_merge_due } = announcement;
                let ticket = self.name();
                self.announcing.insert(ticket, (number, clock::now()));
                self.raw.submit(ticket, write_of(place, &pages, true));
                if is_merge_due {
                    self.requests.merge();
                }
            }
            Ok(Begun::Waiting) => drop(self.announcements.insert(name, writes)),
            Ok(Begun::Busy) => {
                self.announcements.insert(name, writes);
                self.requests.announce(&self.mailbox, name);
            }
            Ok(Begun::Nothing) => self.announced(writes, &Ok(())),
            Err(error) => self.announced(writes, &Err(error)),
        }
    }

    /// How many writes must wait before an announcement is worthwhile.
    fn worth_announcing(&self) -> usize {
        let announced: usize = self.announcements.values().map(Vec::len).sum();
        (announced + self.ready.len() + self.writing).min(GATHERED)
    }

    /// Handles a completed write of log pages, which may also complete announcements of other
    /// channels.
    fn log_written(&mut self, (number, begun): (u64, Nanos), result: io::Result<()>) {
        self.window.announced(clock::now().saturating_sub(begun));
        for (mailbox, name, result) in self.shared.map.end_announcement(number, result) {
            if !Arc::ptr_eq(&mailbox, &self.mailbox) {
                mailbox.put(name, result);
            } else if let Some(writes) = self.announcements.remove(&name) {
                self.announced(writes, &result);
            }
        }
    }

    /// Continues with the writes of an announcement that has completed.
    fn announced(&mut self, writes: Vec<u64>, result: &io::Result<()>) {
        match result {
            Ok(()) => {
                self.ready.extend(writes);
                self.write_ready();
            }
            Err(error) => {
                for id in writes {
                    let Some(operation) = self.operations.remove(&id) else { continue };
                    self.written(Operation { result: Err(copy_error(error)), ..operation });
                }
            }
        }
    }

    /// Writes blocks whose announcement is durable, as many as the write window permits.
    fn write_ready(&mut self) {
        while self.writing < self.window.size()
            && let Some(id) = self.ready.pop_front()
        {
            let Some(operation) = self.operations.get_mut(&id) else { continue };
            operation.stage = Stage::Writing;
            let lba = operation.lba;
            if let StoreRequest::Write { buffer, .. } = &mut operation.request {
                let buffer = std::mem::take(buffer);
                self.writing += 1;
                self.move_blocks(id, StoreRequest::Write { lba, buffer, durable: false });
            }
        }
    }

    /// Handles the end of a write, successful or not.
    fn written(&mut self, mut operation: Operation) {
        let StoreRequest::Write { durable, .. } = operation.request else { return };
        let (map, lba) = (&self.shared.map, operation.lba);
        if operation.result.is_ok() {
            operation.result = map.arrived(lba, &operation.ivs);
        } else {
            map.give_up(lba);
        }
        if durable && operation.result.is_ok() {
            self.await_flush(operation);
        } else {
            self.finish(operation);
        }
    }

    fn await_flush(&mut self, operation: Operation) {
        let id = self.name();
        self.operations.insert(id, Operation { stage: Stage::Flushing, ..operation });
        self.requests.flush(&self.mailbox, id);
    }

    // Ends.

    fn collect_mail(&mut self) {
        for (id, result) in self.mailbox.take() {
            if id == ROOM {
                self.room_came(&result);
                continue;
            }
            if let Some(writes) = self.announcements.remove(&id) {
                self.announced(writes, &result);
            } else if let Some(operation) = self.operations.remove(&id) {
                self.finish(Operation { result, ..operation });
            }
        }
    }

    fn raw_ended(&mut self, done: StoreDone) {
        if let Some((id, fetch)) = self.fetches.remove(&done.ticket) {
            return self.leaf_came(id, fetch, done);
        }
        if let Some(announcement) = self.announcing.remove(&done.ticket) {
            return self.log_written(announcement, done.result);
        }
        let Some(done) = self.parts.ended(done) else { return };
        let Some(mut operation) = self.operations.remove(&done.ticket) else { return };
        if let StoreRequest::Read { buffer, .. } | StoreRequest::Write { buffer, .. } =
            &mut operation.request
        {
            *buffer = done.buffer;
        }
        operation.result = done.result;
        match operation.stage {
            Stage::Writing => {
                self.writing -= 1;
                self.write_ready();
                self.written(operation);
            }
            _ if operation.result.is_ok() => self.blocks_came(operation),
            _ => self.finish(operation),
        }
    }

    fn finish(&mut self, operation: Operation) {
        let Operation { ticket, request, result, .. } = operation;
        self.complete(ticket, request, result);
    }
}

impl ChangeChannel for InPlaceChannel {
    fn waiting(&mut self) -> &mut Waiting {
        &mut self.waiting
    }

    fn room(&self) -> (&Arc<Requests>, &Arc<Mailbox>) {
        (&self.requests, &self.mailbox)
    }

    fn try_change(&mut self, ticket: u64, request: StoreRequest) -> Option<StoreRequest> {
        let map = &self.shared.map;
        let changed = match &request {
            StoreRequest::Write { lba, buffer, .. } => match map.intend(*lba, buffer) {
                Ok(Some(ivs)) => {
                    let (lba, known) = (*lba, Vec::new());
                    let (stage, result) = (Stage::Announcing, Ok(()));
                    let operation = Operation { ticket, request, lba, stage, known, ivs, result };
                    let id = self.name();
                    self.operations.insert(id, operation);
                    self.unannounced.push(id);
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
}

impl StoreChannel for InPlaceChannel {
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
            StoreRequest::Flush => self.await_flush(Operation {
                ticket,
                request,
                lba: 0,
                stage: Stage::Flushing,
                known: Vec::new(),
                ivs: Arc::default(),
                result: Ok(()),
            }),
            StoreRequest::Write { .. } | StoreRequest::Deallocate { .. } => {
                self.change(ticket, request);
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        self.ends.begin_poll();
        self.collect_mail();
        // Continue with everything that a completion has unblocked.
        loop {
            self.announce();
            let mut raw_done = std::mem::take(&mut self.raw_done);
            if self.raw.in_flight() > 0 {
                self.raw.poll(&mut raw_done);
            }
            let is_over = raw_done.is_empty();
            raw_done.drain(..).for_each(|done| self.raw_ended(done));
            self.raw_done = raw_done;
            if is_over {
                break;
            }
        }
        self.ends.end_poll(done);
    }

    fn in_flight(&self) -> usize {
        self.operations.len() + self.waiting.len() + self.ends.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.either.as_fd())
    }

    fn due(&self) -> Option<Nanos> {
        if self.raw.in_flight() > 0 { self.raw.due() } else { None }
    }
}

impl Drop for InPlaceChannel {
    fn drop(&mut self) {
        // A write that completed later could overwrite another channel's.
        let mut done = Vec::new();
        while self.raw.in_flight() > 0 && wait_for_end(&*self.raw).is_ok() {
            self.raw.poll(&mut done);
        }
        // Whoever waits for all announcements in flight to complete must not wait for this channel.
        for (ticket, (number, _)) in self.announcing.drain() {
            let end = done.iter_mut().find(|done| done.ticket == ticket);
            let lost = || Err(io::Error::other("the device did not answer"));
            let result = end.map_or_else(lost, |done| std::mem::replace(&mut done.result, Ok(())));
            for (mailbox, name, result) in self.shared.map.end_announcement(number, result) {
                mailbox.put(name, result);
            }
        }
        // Announced writes may or may not reach the device.
        for operation in self.operations.values() {
            if let Stage::Announcing | Stage::Writing = operation.stage {
                self.shared.map.give_up(operation.lba);
            }
        }
    }
}
