//! Opening a store: recovery from the device's answers and the anchor.

use super::device::{Address, Checkpoint, Device, Entry, LogPage, Page, SECTORS, Tag, tag};
use super::life::{Anchor, Journal, Life, Stage, node};
use super::milestone::Milestone;
use super::rules::{Layout, Policy, Setting};
use super::spec::View;

type Leaf = [Entry; SECTORS];
type Log = Vec<LogPage>;
type Pending = [Option<Entry>; SECTORS];
/// A record of the log and the number of its page.
type Record = (Entry, u8);

/// The entries that the log adds to the leaf, and how far the log was found complete.
#[derive(Clone, Copy)]
struct Recovered {
    pending: Pending,
    found: u8,
}

struct Opening<'a> {
    setting: &'a Setting,
    device: &'a Device,
    anchor: &'a Anchor,
}

impl Opening<'_> {
    fn checkpoints(&self) -> Vec<Checkpoint> {
        let of = |copy| {
            self.device.read(Address::Checkpoint(copy)).into_iter().filter_map(|page| match page {
                Some(Page::Checkpoint(page)) => Some(page),
                _ => None,
            })
        };
        let is_anchored = self.setting.policy != Policy::Never;
        if self.setting.rules.checkpoint_is_the_anchored_one && is_anchored {
            let named = self.anchor.checkpoint_number % 2;
            return of(named).filter(|page| tag(page) == self.anchor.checkpoint).collect();
        }
        if !self.device.is_honest() {
            return of(0).chain(of(1)).collect();
        }
        of(0).chain(of(1)).max_by_key(|page| page.number).into_iter().collect()
    }

    fn leaves(&self, checkpoint: &Checkpoint) -> Vec<Leaf> {
        let pages = self.device.read(Address::Leaf(checkpoint.copy)).into_iter();
        let leaves = pages.filter_map(|page| match page {
            Some(Page::Leaf(leaf)) => Some(leaf),
            _ => None,
        });
        let is_checked = self.setting.rules.root_is_checked;
        leaves.filter(|leaf| !is_checked || node(*leaf) == checkpoint.node).collect()
    }

    /// Every authentic log that the device may return, of any length.
    fn logs(&self, checkpoint: &Checkpoint) -> Vec<(Log, Tag)> {
        let (setting, rules) = (self.setting, &self.setting.rules);
        let mut whole = Vec::new();
        let mut open = vec![(Log::new(), checkpoint.chain)];
        while let Some((log, before)) = open.pop() {
            let number = checkpoint.log_start + log.len() as u8;
            let is_full = log.len() == setting.bounds.log_pages as usize;
            let is_past_head = number >= self.anchor.log_end && !rules.log_counts_beyond_the_head;
            let mut is_end = is_full || is_past_head;
            let pages = if is_end {
                Vec::new()
            } else {
                self.device.read(Address::Log(number % setting.bounds.log_pages))
            };
            for page in pages {
                match page {
                    Some(Page::Log(page))
                        if page.number == number
                            && (page.epoch == checkpoint.epoch
                                || !rules.opening_takes_a_new_epoch)
                            && page.tag == Life::log_tag(setting, before, &page) =>
                    {
                        let tag = page.tag;
                        let mut log = log.clone();
                        log.push(page);
                        open.push((log, tag));
                    }
                    _ => is_end = true,
                }
            }
            if is_end {
                whole.push((log, before));
            }
        }
        let reaches = |log: &Log| checkpoint.log_start + log.len() as u8 >= checkpoint.log_flushed;
        let is_asked = rules.log_reaches_what_its_checkpoint_calls_flushed;
        whole.retain(|(log, _)| self.reaches_head(checkpoint, log) && (reaches(log) || !is_asked));
        whole
    }

    fn reaches_head(&self, checkpoint: &Checkpoint, log: &[LogPage]) -> bool {
        if self.setting.policy == Policy::Never
            || !self.setting.rules.log_reaches_the_anchored_head
            || !self.setting.rules.checkpoint_is_the_anchored_one
        {
            return true;
        }
        let (start, end) = (checkpoint.log_start, self.anchor.log_end);
        match (end - start) as usize {
            0 => checkpoint.chain == self.anchor.head,
            pages => log.get(pages - 1).is_some_and(|page| page.tag == self.anchor.head),
        }
    }

    /// All recoveries that the device's answers allow.
    fn recovered(&self, checkpoint: &Checkpoint, leaf: Leaf, log: &[LogPage]) -> Vec<Recovered> {
        let log_next = checkpoint.log_start + log.len() as u8;
        let marked = log.iter().map(|page| page.flushed).max().unwrap_or(0);
        let marked = marked.max(checkpoint.log_flushed);
        let flushed = match self.setting.policy {
            Policy::Never => marked,
            _ => marked.max(self.anchor.flushed),
        };
        let is_unflushed = |page: &&LogPage| page.number >= flushed;
        // An intent that is carried past the end of a flush was in flight when the flush began.
        let is_carried = |entry: Entry| {
            self.setting.rules.carried_intents_are_not_flushed
                && log.iter().filter(is_unflushed).any(|page| page.entry == entry)
        };
        let is_flushed = |page: &&LogPage| page.number < flushed && !is_carried(page.entry);
        let mut flushed_last: Pending = [None; SECTORS];
        for page in log.iter().filter(is_flushed) {
            flushed_last[page.sector as usize] = Some(page.entry);
        }
        let mut outcomes = vec![Recovered { pending: flushed_last, found: log_next }];
        for (sector, leaf) in leaf.into_iter().enumerate() {
            let records = log.iter().filter(is_unflushed);
            let records = records.filter(|page| page.sector as usize == sector);
            let records: Vec<Record> = records.map(|page| (page.entry, page.number)).collect();
            if records.is_empty() {
                continue;
            }
            let entries: Vec<_> = records.iter().map(|(entry, _)| *entry).collect();
            let expand = |outcome: Recovered| {
                let before = outcome.pending[sector];
                let chosen = match self.setting.layout {
                    Layout::Placed => self.found_placed(sector, &entries, before),
                    Layout::InPlace => {
                        self.found_in_place(sector, &entries, before.unwrap_or(leaf))
                    }
                };
                let records = &records;
                chosen.into_iter().map(move |entry| {
                    let mut outcome = outcome;
                    outcome.pending[sector] = entry;
                    let lost = self.first_lost(sector, records, entry);
                    outcome.found = outcome.found.min(lost.unwrap_or(log_next));
                    outcome
                })
            };
            outcomes = outcomes.into_iter().flat_map(expand).collect();
        }
        outcomes
    }

    /// The first page with a record that was lost and that no later record makes up for. A record
    /// that was in flight at a flush is carried behind it, and only its last place counts.
    fn first_lost(&self, sector: usize, records: &[Record], chosen: Option<Entry>) -> Option<u8> {
        let rules = &self.setting.rules;
        if !rules.found_ends_before_what_is_lost {
            return None;
        }
        let last = records.iter().rposition(|(entry, _)| Some(*entry) == chosen);
        let is_lost = |index: usize, entry: Entry| {
            let is_carried = records[index + 1..].iter().any(|(later, _)| *later == entry);
            let is_made_up_for = last.is_some_and(|last| index < last);
            !is_carried
                && Some(entry) != chosen
                && (!is_made_up_for
                    || !rules.later_records_make_up_for_lost_ones
                        && self.holds(sector, entry).contains(&false))
        };
        let mut lost = (0..).zip(records).filter(|(index, (entry, _))| is_lost(*index, *entry));
        lost.next().map(|(_, (_, page))| *page)
    }

    fn holds(&self, sector: usize, entry: Entry) -> Vec<bool> {
        let is_it = |page: Option<Page>| {
            matches!(page, Some(Page::Data { sector: of, version, .. })
                if of as usize == sector && version == entry.version)
        };
        let mut answers: Vec<_> =
            self.device.read(Address::Data(entry.slot)).into_iter().map(is_it).collect();
        answers.sort_unstable();
        answers.dedup();
        answers
    }

    /// A record counts if its slot holds its version; the latest record that counts is current.
    fn found_placed(
        &self,
        sector: usize,
        records: &[Entry],
        stands: Option<Entry>,
    ) -> Vec<Option<Entry>> {
        let mut found = vec![stands];
        for record in records {
            let answers = if self.setting.rules.unflushed_records_need_their_data {
                self.holds(sector, *record)
            } else {
                vec![true]
            };
            let counted = answers.iter().any(|holds| *holds).then_some(Some(*record));
            if answers.iter().all(|holds| *holds) {
                found.clear();
            }
            found.extend(counted);
        }
        found
    }

    /// If the sector holds the version of an intent, that is current; otherwise the flushed one.
    fn found_in_place(
        &self,
        sector: usize,
        intents: &[Entry],
        stands: Entry,
    ) -> Vec<Option<Entry>> {
        if !self.setting.rules.sectors_with_intents_are_looked_at {
            return vec![intents.last().copied()];
        }
        let answers = self.device.read(Address::Data(sector as u8)).into_iter();
        let mut found: Vec<_> = answers
            .map(|page| {
                let version = match page {
                    Some(Page::Data { version, .. }) => version,
                    _ => 0,
                };
                let intent = intents.iter().find(|intent| intent.version == version);
                Some(intent.copied().unwrap_or(stands))
            })
            .collect();
        found.dedup();
        found
    }

    fn life(
        &self,
        checkpoint: &Checkpoint,
        (log, before): (&[LogPage], Tag),
        leaf: Leaf,
        Recovered { pending, found }: Recovered,
        nonce: u8,
    ) -> (Life, u8) {
        let rules = &self.setting.rules;
        let log_next = checkpoint.log_start + log.len() as u8;
        let is_new = rules.opening_takes_a_new_epoch;
        let epoch = checkpoint.epoch + u8::from(is_new);
        let nonce = if rules.opening_draws_a_nonce { nonce } else { 0 };
        let chain = if is_new { tag(("chain", epoch, nonce)) } else { before };
        let found = Milestone {
            opening: checkpoint.nonce,
            checkpoint: checkpoint.number,
            log_flushed: found,
        };
        let mut passage = checkpoint.passage.clone();
        let has_gateway = self.setting.bounds.gateways > 0;
        if has_gateway {
            passage.end(found, rules);
        }
        let next = Checkpoint {
            number: checkpoint.number + 1,
            epoch,
            nonce,
            log_start: log_next,
            chain,
            passage,
            ..checkpoint.clone()
        };
        let slots = |entries: &mut dyn Iterator<Item = &Entry>| {
            entries.filter(|entry| entry.version > 0).fold(0, |used, entry| used | 1 << entry.slot)
        };
        let used = slots(&mut leaf.iter()) | slots(&mut pending.iter().flatten());
        let life = Life {
            stage: Stage::Opening,
            view: View::default(),
            anchor: *self.anchor,
            checkpoint: next,
            log_next,
            log_tag: chain,
            flushed: log_next,
            pending,
            waiting: Vec::new(),
            in_flight: [None; SECTORS],
            copy: checkpoint.copy,
            node: if rules.root_is_checked { checkpoint.node } else { node(leaf) },
            dirty: None,
            used,
            replaced: 0,
            merged: 0,
            journal: Journal::Idle,
            reached: found,
            is_connected: !has_gateway,
        };
        (life, checkpoint.log_start)
    }
}

/// All ways in which the store may open on this device, each with the start of the log that the
/// anchored checkpoint needs. If there are none, the store is refused.
pub fn open(setting: &Setting, device: &Device, anchor: &Anchor, nonce: u8) -> Vec<(Life, u8)> {
    let opening = Opening { setting, device, anchor };
    let mut lives = Vec::new();
    for checkpoint in opening.checkpoints() {
        for leaf in opening.leaves(&checkpoint) {
            for (log, before) in opening.logs(&checkpoint) {
                for recovered in opening.recovered(&checkpoint, leaf, &log) {
                    let log = (&log[..], before);
                    lives.push(opening.life(&checkpoint, log, leaf, recovered, nonce));
                }
            }
        }
    }
    lives
}
