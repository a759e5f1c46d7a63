//! One life of the store: the memory of a process that serves it, and its actions.

use super::device::{
    Address, Checkpoint, Device, Entry, LogPage, Page, SECTORS, Tag, Version, tag,
};
use super::milestone::Milestone;
use super::rules::{Layout, Policy, SLOTS, Setting};
use super::spec::View;

/// The anchor's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Anchor {
    pub number: u8,
    pub epoch: u8,
    pub checkpoint: Tag,
    pub checkpoint_number: u8,
    /// The number of the log page after the head, and the head's tag.
    pub log_end: u8,
    pub head: Tag,
    /// Log pages before this one are flushed.
    pub flushed: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Progress {
    /// In place: the intent waits to be logged.
    Noted,
    /// In place: the intent is in the log, but not durable.
    Logged,
    Ready,
    /// The data have been given to the device.
    Issued,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InFlight {
    pub entry: Entry,
    pub progress: Progress,
}

/// State of the journal, which does one thing at a time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Journal {
    Idle,
    /// Log pages are written. Has the latest versions at its beginning, and the slots that it
    /// frees.
    Log {
        is_flush: bool,
        latest: [Option<Version>; SECTORS],
        frees: u8,
        flushed: u8,
    },
    /// The flush is durable, but not anchored.
    Flushed {
        latest: [Option<Version>; SECTORS],
    },
    /// The checkpoint's leaves are not durable.
    Leaves {
        start: u8,
        chain: Tag,
    },
    Page(Checkpoint),
    /// The checkpoint is durable, but not anchored.
    Written(Checkpoint),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The opening's log is written.
    Opening,
    /// The log is durable; the opening's checkpoint is written.
    Logged,
    /// Both are durable, but not anchored.
    Durable,
    Running,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Life {
    pub stage: Stage,
    pub view: View,
    pub anchor: Anchor,
    pub checkpoint: Checkpoint,
    pub log_next: u8,
    pub log_tag: Tag,
    pub flushed: u8,
    pub pending: [Option<Entry>; SECTORS],
    pub waiting: Vec<(u8, Entry)>,
    pub in_flight: [Option<InFlight>; SECTORS],
    /// The copy of the leaf page that is in use.
    pub copy: u8,
    pub node: Tag,
    /// The leaf page, if it is in memory only: the paper's write-back cache.
    pub dirty: Option<[Entry; SECTORS]>,
    pub used: u8,
    /// Replaced slots to be freed with the log; merged ones to be freed with the checkpoint.
    pub replaced: u8,
    pub merged: u8,
    pub journal: Journal,
    /// How far it has come, as reported so far.
    pub reached: Milestone,
    /// Whether the gateway is connected, or there is none.
    pub is_connected: bool,
}

pub fn node(entries: [Entry; SECTORS]) -> Tag {
    tag(("node", entries))
}

pub fn fast_mac(sector: usize, version: Version, node: Tag) -> Tag {
    tag(("fast", sector, version, node))
}

impl Life {
    pub fn serves(&self, setting: &Setting) -> bool {
        let is_open = self.stage == Stage::Running || !setting.rules.opening_anchors_before_io;
        is_open && self.is_connected
    }

    /// Records how far it has come.
    pub fn pass_milestone(&mut self, log_flushed: u8) {
        let Checkpoint { nonce: opening, number: checkpoint, .. } = self.checkpoint;
        self.reached = Milestone { opening, checkpoint, log_flushed };
    }

    /// The milestone for a gateway now.
    pub fn told(&self) -> Milestone {
        self.checkpoint.passage.told(self.reached)
    }

    /// Tag of a log page, chained to that of the previous page.
    pub fn log_tag(setting: &Setting, before: Tag, page: &LogPage) -> Tag {
        let chain = setting.rules.chain_is_checked.then_some(before);
        let epoch = setting.rules.opening_takes_a_new_epoch.then_some(page.epoch);
        tag((chain, epoch, page.number, page.flushed, page.sector, page.entry))
    }

    fn log(
        &mut self,
        setting: &Setting,
        device: &mut Device,
        sector: u8,
        entry: Entry,
        flushed: u8,
    ) {
        let (epoch, number) = (self.checkpoint.epoch, self.log_next);
        let mut page = LogPage { epoch, number, flushed, sector, entry, tag: 0 };
        page.tag = Self::log_tag(setting, self.log_tag, &page);
        self.log_tag = page.tag;
        self.log_next += 1;
        device.write(Address::Log(number % setting.bounds.log_pages), Page::Log(page));
    }

    /// Whether this many more pages leave room for the log that the next opening writes.
    fn has_room(&self, setting: &Setting, pages: usize) -> bool {
        let used = (self.log_next - self.checkpoint.log_start) as usize;
        !setting.rules.log_waits_for_the_checkpoint
            || used + pages + SECTORS <= setting.bounds.log_pages as usize
    }

    pub fn free_slot(&self, setting: &Setting, sector: usize) -> Option<u8> {
        match setting.layout {
            Layout::InPlace => Some(sector as u8),
            Layout::Placed => (0..SLOTS).find(|slot| self.used & (1 << slot) == 0),
        }
    }

    /// Begins a write.
    pub fn begin(&mut self, setting: &Setting, sector: usize, version: Version, slot: u8) {
        let entry = Entry { version, slot };
        self.used |= 1 << slot;
        let progress = match setting.layout {
            Layout::Placed => Progress::Ready,
            Layout::InPlace => Progress::Noted,
        };
        self.in_flight[sector] = Some(InFlight { entry, progress });
    }

    pub fn data(&self, setting: &Setting, sector: usize, entry: Entry) -> (Address, Page) {
        let is_over_it = setting.rules.fast_mac_covers_the_iv || setting.layout == Layout::Placed;
        let fast = if is_over_it { 0 } else { fast_mac(sector, entry.version, self.node) };
        let page = Page::Data { sector: sector as u8, version: entry.version, fast };
        (Address::Data(entry.slot), page)
    }

    pub fn end(&mut self, setting: &Setting, sector: usize) {
        let Some(InFlight { entry, .. }) = self.in_flight[sector].take() else { return };
        self.view.acknowledged(sector, entry.version);
        let before = self.pending[sector].replace(entry);
        if setting.layout == Layout::Placed {
            self.waiting.push((sector as u8, entry));
            self.replaced |= before.map_or(0, |before| 1 << before.slot);
            if !setting.rules.replaced_slots_wait_for_the_record {
                self.used &= !std::mem::take(&mut self.replaced);
            }
        }
    }

    /// Writes waiting records to the log: for a flush, or so that data may be written.
    pub fn begin_log(&mut self, setting: &Setting, device: &mut Device, is_flush: bool) -> bool {
        let mut records = std::mem::take(&mut self.waiting);
        let mut carried = Vec::new();
        for (sector, in_flight) in (0u8..).zip(&mut self.in_flight) {
            let Some(in_flight) = in_flight else { continue };
            match in_flight.progress {
                Progress::Noted => {
                    in_flight.progress = Progress::Logged;
                    records.push((sector, in_flight.entry));
                }
                Progress::Ready | Progress::Issued if setting.layout == Layout::InPlace => {
                    carried.push((sector, in_flight.entry));
                }
                _ => {}
            }
        }
        let is_carried = is_flush && setting.rules.flush_carries_intents_in_flight;
        // Intents noted now are in flight, too, so they come after the flush's end in the log.
        let (before, after) = match setting.layout {
            Layout::Placed => (records, Vec::new()),
            Layout::InPlace if is_carried => (Vec::new(), [carried, records].concat()),
            Layout::InPlace => (Vec::new(), records),
        };
        if !self.has_room(setting, before.len() + after.len()) {
            return false;
        }
        let marker = if setting.rules.marker_speaks_of_earlier_syncs { self.flushed } else { 99 };
        for (sector, entry) in before {
            self.log(setting, device, sector, entry, marker);
        }
        let border = self.log_next;
        for (sector, entry) in after {
            self.log(setting, device, sector, entry, marker.min(border));
        }
        let flushed = if !is_flush {
            self.flushed
        } else if setting.rules.flush_carries_intents_in_flight {
            border
        } else {
            self.log_next
        };
        let (latest, frees) = (self.view.latest(), std::mem::take(&mut self.replaced));
        self.journal = Journal::Log { is_flush, latest, frees, flushed };
        if !setting.rules.intents_are_durable_before_data {
            self.intents_ready();
        }
        true
    }

    pub fn intents_ready(&mut self) {
        for in_flight in self.in_flight.iter_mut().flatten() {
            if in_flight.progress == Progress::Logged {
                in_flight.progress = Progress::Ready;
            }
        }
    }

    /// The anchor's record for the durable log.
    pub fn flush_anchor(&self, flushed: u8) -> Anchor {
        Anchor {
            number: self.anchor.number + 1,
            log_end: self.log_next,
            head: self.log_tag,
            flushed,
            ..self.anchor
        }
    }

    pub fn checkpoint_anchor(&self, checkpoint: &Checkpoint) -> Anchor {
        Anchor {
            number: self.anchor.number + 1,
            epoch: checkpoint.epoch,
            checkpoint: tag(checkpoint),
            checkpoint_number: checkpoint.number,
            log_end: self.log_next,
            head: self.log_tag,
            flushed: self.flushed,
        }
    }

    pub fn acknowledge_flush(
        &mut self,
        setting: &Setting,
        device: &Device,
        latest: [Option<Version>; SECTORS],
    ) {
        self.pass_milestone(self.flushed);
        self.view.flushed(latest);
        if device.is_honest() || setting.policy == Policy::EveryFlush {
            self.view.settle();
        }
    }

    /// Applies pending entries to the leaf page, given as read.
    pub fn merge(&mut self, setting: &Setting, device: &mut Device, mut entries: [Entry; SECTORS]) {
        for (entry, pending) in entries.iter_mut().zip(&mut self.pending) {
            if let Some(pending) = pending.take() {
                if setting.layout == Layout::Placed && entry.version > 0 {
                    self.merged |= 1 << entry.slot;
                }
                *entry = pending;
            }
        }
        if !setting.rules.merged_slots_wait_for_the_checkpoint {
            self.used &= !std::mem::take(&mut self.merged);
        }
        let is_other = setting.rules.merge_writes_the_other_copy;
        self.copy = if is_other { 1 - self.checkpoint.copy } else { self.checkpoint.copy };
        self.node = node(entries);
        if setting.rules.merged_leaves_are_written {
            device.write(Address::Leaf(self.copy), Page::Leaf(entries));
        } else {
            self.dirty = Some(entries);
        }
    }

    /// Begins a checkpoint, which requires that everything completed is merged.
    pub fn begin_checkpoint(&mut self, setting: &Setting, device: &mut Device) -> bool {
        let carried: Vec<_> = (0u8..)
            .zip(&self.in_flight)
            .filter_map(|(sector, in_flight)| {
                in_flight
                    .filter(|in_flight| in_flight.progress != Progress::Noted)
                    .map(|in_flight| (sector, in_flight.entry))
            })
            .collect();
        let is_carried =
            setting.layout == Layout::InPlace && setting.rules.checkpoint_carries_intents_in_flight;
        let carried = if is_carried { carried } else { Vec::new() };
        if !self.has_room(setting, carried.len()) {
            return false;
        }
        self.waiting.clear();
        self.merged |= std::mem::take(&mut self.replaced);
        let (start, chain) = (self.log_next, self.log_tag);
        for (sector, entry) in carried {
            self.log(setting, device, sector, entry, self.flushed);
        }
        self.journal = Journal::Leaves { start, chain };
        true
    }

    pub fn write_checkpoint(&mut self, device: &mut Device, start: u8, chain: Tag) -> Checkpoint {
        let number = self.checkpoint.number + 1;
        let (copy, node, log_start) = (self.copy, self.node, start);
        let log_flushed = self.flushed.max(start);
        let passage = self.checkpoint.passage.clone();
        let (epoch, nonce) = (self.checkpoint.epoch, self.checkpoint.nonce);
        let next =
            Checkpoint { number, epoch, nonce, copy, node, log_start, chain, log_flushed, passage };
        device.write(Address::Checkpoint(number % 2), Page::Checkpoint(next.clone()));
        next
    }

    /// Frees the log, leaf copy and slots that the previous checkpoint needed.
    pub fn end_checkpoint(&mut self, setting: &Setting, checkpoint: Checkpoint) {
        self.checkpoint = checkpoint;
        if setting.layout == Layout::Placed {
            self.used &= !std::mem::take(&mut self.merged);
        }
        self.journal = Journal::Idle;
    }

    /// Writes the entries that an opening found pending to a new log.
    pub fn write_opening(&mut self, setting: &Setting, device: &mut Device, old_start: u8) {
        if !setting.rules.opening_keeps_the_old_log {
            self.log_next = old_start;
            self.checkpoint.log_start = old_start;
        }
        self.log_tag = self.checkpoint.chain;
        for sector in 0..SECTORS {
            if let Some(entry) = self.pending[sector]
                && setting.rules.opening_logs_pending_anew
            {
                self.log(setting, device, sector as u8, entry, 0);
            }
        }
        self.flushed = self.log_next;
        self.checkpoint.log_flushed = self.flushed;
        self.pass_milestone(self.flushed);
        if setting.bounds.gateways > 0 {
            self.checkpoint.passage.begin(self.reached);
        }
    }

    /// Writes the checkpoint of an opening.
    pub fn write_opened(&self, device: &mut Device) {
        let page = Page::Checkpoint(self.checkpoint.clone());
        device.write(Address::Checkpoint(self.checkpoint.number % 2), page);
    }
}
