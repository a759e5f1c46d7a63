//! Reads, merges and the refresh job of a life, given the device's answers.

use super::device::{Address, Entry, Page, SECTORS, Version};
use super::life::{Journal, Life, fast_mac, node};
use super::model::Next;
use super::rules::Layout;

impl Next<'_> {
    /// The possible current entries according to a life's pending table or the leaf page.
    fn entries(&self, life: &Life, sector: usize) -> Vec<Entry> {
        let rules = &self.setting.rules;
        if let Some(entry) = life.pending[sector]
            && rules.reads_look_at_pending_first
        {
            return vec![entry];
        }
        self.leaves(life).into_iter().map(|leaf| leaf[sector]).collect()
    }

    fn leaves(&self, life: &Life) -> Vec<[Entry; SECTORS]> {
        if let Some(dirty) = life.dirty {
            return vec![dirty];
        }
        let pages = self.world.device.read(Address::Leaf(life.copy)).into_iter();
        let leaves = pages.filter_map(|page| match page {
            Some(Page::Leaf(leaf)) => Some(leaf),
            _ => None,
        });
        let is_checked = self.setting.rules.leaves_are_checked;
        leaves.filter(|leaf| !is_checked || node(*leaf) == life.node).collect()
    }

    /// Versions of a sector that the life accepts among the device's possible answers.
    fn accepted(&self, life: &Life, sector: usize) -> Vec<Version> {
        let device = &self.world.device;
        let mut accepted = Vec::new();
        for entry in self.entries(life, sector) {
            if entry.version == 0 {
                accepted.push(0);
                continue;
            }
            accepted.extend(device.read(Address::Data(entry.slot)).into_iter().filter_map(
                |page| match page {
                    Some(Page::Data { sector: of, version, .. })
                        if of as usize == sector && version == entry.version =>
                    {
                        Some(version)
                    }
                    _ => None,
                },
            ));
        }
        let is_fast = self.setting.layout == Layout::InPlace
            && (life.pending[sector].is_none() || !self.setting.rules.reads_look_at_pending_first);
        if is_fast {
            let pages = device.read(Address::Data(sector as u8)).into_iter();
            accepted.extend(pages.filter_map(|page| match page {
                Some(Page::Data { version, fast, .. })
                    if fast == fast_mac(sector, version, life.node) =>
                {
                    Some(version)
                }
                _ => None,
            }));
        }
        accepted.sort_unstable();
        accepted.dedup();
        accepted
    }

    pub fn read(&mut self, number: usize, sector: usize) {
        let life = &self.world.lives[number];
        let epoch = life.checkpoint.epoch;
        let accepted = self.accepted(life, sector);
        let what = format!("epoch {epoch}: sector {sector} is read");
        if accepted.is_empty() && self.world.device.is_honest() {
            let detail = "VIOLATION: an honest device's sector is refused".into();
            self.add(what.clone(), Err(detail));
        }
        for version in accepted {
            let mut world = self.world.clone();
            let outcome = world.lives[number].view.returned(sector, version);
            self.add(format!("{what}: version {version}"), outcome.map(|()| world));
        }
    }

    pub fn merge(&mut self, number: usize) {
        let (world, setting) = (self.world, self.setting);
        let life = &world.lives[number];
        let is_free =
            matches!(life.journal, Journal::Idle | Journal::Log { .. } | Journal::Flushed { .. })
                || !setting.rules.merge_waits_for_a_checkpoint;
        let is_due = life.pending != [None; SECTORS] && is_free;
        if !is_due || world.spent.merges >= setting.bounds.merges {
            return;
        }
        let leaves = self.leaves(life);
        if leaves.is_empty() && world.device.is_honest() {
            let detail = "VIOLATION: an honest device's leaf page is refused".into();
            self.add("a merge reads the leaf page".into(), Err(detail));
        }
        for leaf in leaves {
            self.step(number, "pending entries are merged", |life, world| {
                world.spent.merges += 1;
                life.merge(setting, &mut world.device, leaf);
            });
        }
    }

    /// The refresh job issues a fast-path MAC for a sector under the current node.
    pub fn refresh(&mut self, number: usize, sector: usize) {
        let (world, setting) = (self.world, self.setting);
        let life = &world.lives[number];
        if world.spent.refreshes >= setting.bounds.refreshes || life.pending[sector].is_some() {
            return;
        }
        let expected: Vec<_> =
            self.leaves(life).into_iter().map(|leaf| leaf[sector].version).collect();
        for page in world.device.read(Address::Data(sector as u8)) {
            let Some(Page::Data { version, .. }) = page else { continue };
            if !expected.contains(&version) && setting.rules.refresh_checks_in_full {
                continue;
            }
            let fast = fast_mac(sector, version, life.node);
            let page = Page::Data { sector: sector as u8, version, fast };
            let what = format!("sector {sector} is refreshed with version {version}");
            self.step(number, &what, |_, world| {
                world.spent.refreshes += 1;
                world.device.write(Address::Data(sector as u8), page);
            });
        }
    }
}
