//! Checks for a scrub everything that an opening reads first: superblock, checkpoint, pages of
//! nodes and log. Rewrites what is wrong on the device and known in memory.

use std::io;
use std::sync::Arc;

use sealane_proto::freshness::leaf::LeafPage;
use zerocopy::IntoBytes;

use super::super::super::upkeep::Report;
use super::super::pages::{PAGE_BYTES, Page};
use super::commit::Writer;
use super::failure::Refusal;
use super::keys::{Kind, Tag};
use super::leaves::{Checked, Fetch};
use super::log::LogPage;
use super::log_head::LogHead;
use super::map::{Layout, Map};
use super::merge::Repair;
use super::nodes::NodePage;
use super::upkeep::{note, note_known, read_each};

/// Most pages checked in one piece: a flush or a step of a merge waits for at most one piece.
const PIECE_PAGES: u64 = 32;

/// What a scrub checks next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// The superblock, and the checkpoint from which the next opening starts.
    Checkpoint,
    /// Pages of nodes, from this one on.
    Nodes(u64),
    /// Log pages from this one on, and the tag of the page before it; `None`: the whole log.
    Log(Option<(u64, Tag)>),
}

impl<F: Layout> Map<F> {
    /// Checks a piece of the device's contents other than leaf pages and blocks. Returns the next
    /// piece.
    pub fn check_structure(&self, piece: Piece, report: &mut Report) -> io::Result<Option<Piece>> {
        // Nobody writes these pages meanwhile, so memory and device agree.
        let mut writer = self.writer();
        if let Err(failure) = self.state().check() {
            // It is unknown what the device should contain.
            note(report, None, "store", failure)?;
            return Ok(None);
        }
        match piece {
            Piece::Checkpoint => {
                self.check_superblock(&mut writer, report)?;
                self.check_checkpoint(&writer, report)?;
                Ok(Some(Piece::Nodes(0)))
            }
            Piece::Nodes(first) => {
                let end = first + PIECE_PAGES.min(self.geometry.nodes_together(first));
                self.check_nodes(&writer, first, end, report)?;
                let is_last = end == self.geometry.node_pages();
                Ok(Some(if is_last { Piece::Log(None) } else { Piece::Nodes(end) }))
            }
            Piece::Log(from) => {
                let log = self.quiet_log(&writer);
                // Pages before the last checkpoint aren't part of the log any more.
                let from = from.filter(|(number, _)| *number > log.start.0);
                self.check_log(&log, from.unwrap_or(log.start), report)
            }
        }
    }

    fn read_pages(&self, first: u64, count: u64, report: &mut Report) -> Vec<io::Result<Page>> {
        report.bytes += count * PAGE_BYTES as u64;
        let pages = read_each(count as usize, PAGE_BYTES, |run| {
            let mut pages = vec![Page::ZERO; run.len()];
            self.file.read(first + run.start as u64, &mut pages)?;
            Ok(pages.as_bytes().to_vec())
        });
        let page = |bytes: Vec<u8>| {
            let mut page = Page::ZERO;
            page.0.copy_from_slice(&bytes);
            page
        };
        pages.into_iter().map(|bytes| bytes.map(page)).collect()
    }

    fn check_superblock(
        &self,
        writer: &mut Writer<F::Entry>,
        report: &mut Report,
    ) -> io::Result<()> {
        for page in self.read_pages(0, 1, report) {
            let is_right = judge(report, "superblock", page.map(|page| page == *self.superblock))?;
            writer.rewrites_superblock |= !is_right;
        }
        Ok(())
    }

    /// Writes the superblock durably.
    pub(super) fn write_superblock(&self) -> io::Result<()> {
        self.file.write(0, std::slice::from_ref(&*self.superblock))?;
        self.file.sync()
    }

    /// Checks the last checkpoint, and the one in the anchor's record if it differs.
    fn check_checkpoint(&self, writer: &Writer<F::Entry>, report: &mut Report) -> io::Result<()> {
        let last = (writer.checkpoint, writer.checkpoint_tag);
        let anchored = writer.anchored.map(|it| (it.checkpoint, it.checkpoint_tag));
        let wanted = anchored.into_iter().filter(|anchored| *anchored != last).chain([last]);
        for (number, tag) in wanted {
            let what = format!("checkpoint {number}");
            for page in self.read_pages(self.geometry.checkpoint(number), 1, report) {
                let found = page.map(|page| self.keys.pages().check(Kind::Checkpoint, &page));
                judge(report, &what, found.map(|found| found == Some(tag)))?;
            }
        }
        Ok(())
    }

    fn check_nodes(
        &self,
        writer: &Writer<F::Entry>,
        first: u64,
        end: u64,
        report: &mut Report,
    ) -> io::Result<()> {
        let [left, right] = [0, 1]
            .map(|copy| self.read_pages(self.geometry.nodes(first, copy), end - first, report));
        for (index, (left, right)) in (first..).zip(left.into_iter().zip(right)) {
            let copies = left.and_then(|left| Ok([left, right?]));
            let is_right = copies.map(|copies| {
                let copies = copies.map(|page| NodePage::decode(&page, &self.keys));
                self.leaves.is_node_page_right(writer.checkpoint, index, copies)
            });
            if !judge(report, &format!("page {index} of nodes"), is_right)? {
                self.leaves.rewrite_node_page(index);
            }
        }
        Ok(())
    }

    fn check_log(
        &self,
        log: &LogHead,
        (mut number, mut tag): (u64, Tag),
        report: &mut Report,
    ) -> io::Result<Option<Piece>> {
        let to_wrap = self.geometry.log_pages - number % self.geometry.log_pages;
        let count = PIECE_PAGES.min(to_wrap).min(log.next - number);
        for page in self.read_pages(self.geometry.log(number), count, report) {
            let next = page.map(|page| {
                let place = (log.epoch, number);
                let page = LogPage::decode::<F>(&page, place, &log.key);
                page.filter(|(page, _)| page.previous == tag).map(|(_, next)| next)
            });
            let found = next.as_ref().ok().copied().flatten();
            if !judge(
                report,
                &format!("page {number} of the log"),
                next.map(|next| next.is_some()),
            )? {
                // The tag that the next page must continue is unknown.
                return Ok(None);
            }
            (number, tag) = (number + 1, found.unwrap_or(tag));
        }
        if number < log.next {
            return Ok(Some(Piece::Log(Some((number, tag)))));
        }
        judge(report, "end of the log", Ok(tag == log.tag))?;
        Ok(None)
    }

    /// The correct contents of a leaf that is wrong on the device: from memory, or derived from its
    /// blocks. `None` if unknown. [`Map::repair`] writes it.
    pub fn recover_leaf(&self, fetch: &Fetch) -> io::Result<Option<Arc<LeafPage>>> {
        let sets = self.geometry.sets();
        if let Some(index) = fetch.leaf.checked_sub(sets) {
            let mut writer = self.writer();
            writer.slot_maps.rewrite(index);
            return Ok(Some(writer.slot_maps.page(index)));
        }
        let noted = self.writer().repairs.get(&fetch.leaf).map(|repair| Arc::clone(&repair.page));
        let found = match noted.or_else(|| self.leaves.cached(fetch.leaf)) {
            None => F::derive(fetch.leaf, &*self.file, &self.geometry)?.map(Arc::new),
            found => found,
        };
        let Some(page) = found else { return Ok(None) };
        // A derived page is right only if it matches the node.
        let Ok(Checked::Right(page)) = self.leaves.check(fetch, &page) else { return Ok(None) };
        let repair = Repair { page: Arc::clone(&page), held: fetch.held };
        self.writer().repairs.insert(fetch.leaf, repair);
        Ok(Some(page))
    }

    /// Rewrites everything that was found wrong and is known, with a checkpoint. Fails if that
    /// can't be written or anchored.
    pub fn repair(&self) -> io::Result<()> {
        // A running merge began before the errors were found.
        self.merge_in_steps()?;
        self.begin_merge()?;
        self.merge_in_steps()?;
        self.state().check()?;
        if std::mem::take(&mut self.writer().rewrites_superblock) {
            self.write_superblock()?;
        }
        Ok(())
    }

    /// The first log page of the last checkpoint.
    #[cfg(test)]
    pub fn log_start(&self) -> u64 {
        self.log().start.0
    }

    /// Completes a running merge in steps, between which flushes may run.
    fn merge_in_steps(&self) -> io::Result<()> {
        while self.is_merging() {
            self.merge_step()?;
        }
        Ok(())
    }
}

/// Adds a finding for a page that isn't the version written last or can't be read. Returns whether
/// it is right.
fn judge(report: &mut Report, what: &str, is_right: io::Result<bool>) -> io::Result<bool> {
    match is_right {
        Ok(true) => return Ok(true),
        Ok(false) => note_known(report, None, what, Refusal::Damaged.into())?,
        Err(error) => note(report, None, what, error)?,
    }
    Ok(false)
}
