//! Checking, for a scrub, what an opening reads before all else: superblock, checkpoint, pages of nodes
//! and log. And writing again what is wrong on the device and right in memory.

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

/// Pages looked at in one piece: a flush or a step of a merge waits for one at most.
const PIECE_PAGES: u64 = 32;

/// What a scrub looks at next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// The superblock, and the checkpoint that the next opening begins with.
    Checkpoint,
    /// Pages of nodes, from this one on.
    Nodes(u64),
    /// Log pages from this one on, which goes on from the tag; None: all of them.
    Log(Option<(u64, Tag)>),
}

impl<F: Layout> Map<F> {
    /// Checks a piece of what the device has beside leaf pages and blocks. Returns the next piece.
    pub fn check_structure(&self, piece: Piece, report: &mut Report) -> io::Result<Option<Piece>> {
        // Nobody writes there meanwhile: memory and device are of one moment.
        let mut writer = self.writer();
        if let Err(failure) = self.state().check() {
            // Nobody knows what the device should have.
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
                // What was before the last checkpoint is no part of the log any more.
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

    /// Writes the superblock, durably.
    pub(super) fn write_superblock(&self) -> io::Result<()> {
        self.file.write(0, std::slice::from_ref(&*self.superblock))?;
        self.file.sync()
    }

    /// The last checkpoint, and the one that the anchor names if that is another.
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
                // Nothing tells what the one after it should go on from.
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

    /// What a leaf must be that is wrong on the device: from memory, or from what it is made of. None:
    /// it can't be known. It is written again by [`Map::repair`].
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
        // What is derived is right only if it comes to the node.
        let Ok(Checked::Right(page)) = self.leaves.check(fetch, &page) else { return Ok(None) };
        let repair = Repair { page: Arc::clone(&page), held: fetch.held };
        self.writer().repairs.insert(fetch.leaf, repair);
        Ok(Some(page))
    }

    /// Writes again, with a checkpoint, what was found wrong and is known. An error if it isn't written,
    /// or isn't anchored.
    pub fn repair(&self) -> io::Result<()> {
        // One that is under way began before this was found.
        self.merge_in_steps()?;
        self.begin_merge()?;
        self.merge_in_steps()?;
        self.state().check()?;
        if std::mem::take(&mut self.writer().rewrites_superblock) {
            self.write_superblock()?;
        }
        Ok(())
    }

    /// The first log page that the last checkpoint goes on from.
    #[cfg(test)]
    pub fn log_start(&self) -> u64 {
        self.log().start.0
    }

    /// Goes on with the merge under way, if there is one, letting flushes pass between its steps.
    fn merge_in_steps(&self) -> io::Result<()> {
        while self.is_merging() {
            self.merge_step()?;
        }
        Ok(())
    }
}

/// Notes what isn't as it was written last, or can't be read; whether it is right.
fn judge(report: &mut Report, what: &str, is_right: io::Result<bool>) -> io::Result<bool> {
    match is_right {
        Ok(true) => return Ok(true),
        Ok(false) => note_known(report, None, what, Refusal::Damaged.into())?,
        Err(error) => note(report, None, what, error)?,
    }
    Ok(false)
}
