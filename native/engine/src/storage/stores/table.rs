//! Table of a sealed file store in memory: for every block its slot and metadata, in the pages in
//! which checkpoints write it.

use super::layout::{ENTRIES_PER_PAGE, Entry};

/// A table page in memory.
#[derive(Debug)]
struct Held {
    entries: [Entry; ENTRIES_PER_PAGE as usize],
    /// The copy on the device that holds the page's last checkpoint, and its part in the sum.
    copy: Option<(u8, u64)>,
    is_dirty: bool,
}

/// Entries of a page, to write to one of its copies.
#[derive(Debug)]
pub struct Snapshot {
    /// Place of the page in the table.
    pub index: u64,
    /// The copy that the last checkpoint doesn't need.
    pub copy: u8,
    /// What to write.
    pub entries: [Entry; ENTRIES_PER_PAGE as usize],
}

/// The table. Pages exist once one of their blocks was written.
#[derive(Debug)]
pub struct Table {
    pages: Vec<Option<Box<Held>>>,
    dirty: Vec<u64>,
    sum: u64,
}

impl Table {
    /// A table in which no block was ever written.
    #[must_use]
    pub fn new(page_count: u64) -> Self {
        Self { pages: (0..page_count).map(|_| None).collect(), dirty: Vec::new(), sum: 0 }
    }

    /// Takes a page as the device's copy has it.
    pub fn load(
        &mut self,
        index: u64,
        copy: (u8, u64),
        entries: [Entry; ENTRIES_PER_PAGE as usize],
    ) {
        self.sum = self.sum.wrapping_add(copy.1);
        if let Some(page) = self.pages.get_mut(index as usize) {
            *page = Some(Box::new(Held { entries, copy: Some(copy), is_dirty: false }));
        }
    }

    /// What is known of a block.
    #[must_use]
    pub fn entry(&self, lba: u64) -> Entry {
        let page = self.pages.get((lba / ENTRIES_PER_PAGE) as usize).and_then(Option::as_ref);
        page.map_or(Entry::UNWRITTEN, |page| page.entries[(lba % ENTRIES_PER_PAGE) as usize])
    }

    /// Changes a block, unless it was changed later already. Returns what it was.
    pub fn set(&mut self, lba: u64, entry: Entry) -> Option<Entry> {
        let index = lba / ENTRIES_PER_PAGE;
        self.touch(index);
        let page = self.pages.get_mut(index as usize)?.as_mut()?;
        let held = &mut page.entries[(lba % ENTRIES_PER_PAGE) as usize];
        (held.stamp < entry.stamp).then(|| std::mem::replace(held, entry))
    }

    /// Has the next checkpoint write a page, changed or not.
    pub fn touch(&mut self, index: u64) {
        let Some(page) = self.pages.get_mut(index as usize) else { return };
        let page = page.get_or_insert_with(|| {
            let entries = [Entry::UNWRITTEN; ENTRIES_PER_PAGE as usize];
            Box::new(Held { entries, copy: None, is_dirty: false })
        });
        if !page.is_dirty {
            page.is_dirty = true;
            self.dirty.push(index);
        }
    }

    /// Deallocates the blocks from `start` to `end` that were not changed later, and tells which
    /// slots they had. Pages that don't exist are passed over: none of their blocks is written.
    pub fn deallocate(&mut self, start: u64, end: u64, stamp: u64, slots: &mut Vec<u64>) {
        let mut lba = start;
        while lba < end {
            let page_end = end.min((lba / ENTRIES_PER_PAGE + 1) * ENTRIES_PER_PAGE);
            if self.pages.get((lba / ENTRIES_PER_PAGE) as usize).is_some_and(Option::is_some) {
                let replaced = (lba..page_end)
                    .filter_map(|lba| self.set(lba, Entry::deallocated(stamp)))
                    .filter_map(|entry| entry.slot);
                slots.extend(replaced);
            }
            lba = page_end;
        }
    }

    /// Pages changed since the last checkpoint began.
    #[must_use]
    pub fn dirty(&self) -> usize {
        self.dirty.len()
    }

    /// Their indices, for the checkpoint that begins now.
    pub fn take_dirty(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.dirty)
    }

    /// Copies a page for the checkpoint; later changes go to the next one.
    pub fn snapshot(&mut self, index: u64) -> Option<Snapshot> {
        let page = self.pages.get_mut(index as usize)?.as_mut()?;
        page.is_dirty = false;
        let copy = page.copy.map_or(0, |(copy, _)| 1 - copy);
        Some(Snapshot { index, copy, entries: page.entries })
    }

    /// Notes that a snapshot was written, with its part in the sum.
    pub fn written(&mut self, snapshot: &Snapshot, sum: u64) {
        if let Some(Some(page)) = self.pages.get_mut(snapshot.index as usize) {
            let before = page.copy.replace((snapshot.copy, sum)).map_or(0, |(_, sum)| sum);
            self.sum = self.sum.wrapping_sub(before).wrapping_add(sum);
        }
    }

    /// Sum over the pages on the device.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Every block that has a slot.
    pub fn written_blocks(&self) -> impl Iterator<Item = (u64, &Entry)> {
        let pages = (0..).step_by(ENTRIES_PER_PAGE as usize).zip(&self.pages);
        let entries = pages.filter_map(|(first, page)| Some((first, page.as_ref()?)));
        let entries = entries.flat_map(|(first, page)| (first..).zip(&page.entries));
        entries.filter(|(_, entry)| entry.slot.is_some())
    }
}
