//! The tree over the leaf pages, which copy of each is current, and the leaf pages last used.
//!
//! All of it changes together, under one lock that is never held across I/O: a page in the cache is
//! always the one that the tree's node names.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::unsync::Cache;
use sealane_proto::freshness::leaf::Leaf;
use sealane_proto::freshness::node::{Node, NodeKey};
use sealane_proto::freshness::tree::{Root, Tree};

use super::super::pages::Page;
use super::checkpoint::REGIONS;
use super::counters::{Counters, count};
use super::failure::Refusal;
use super::geometry::Geometry;
use super::nodes::{Held, NODES_PER_PAGE, NodePage};

/// Leaf pages kept in memory: 64 MiB, which is 4.7 GiB of blocks out of place.
const CACHE_PAGES: usize = 16_384;

/// Where a leaf is.
#[derive(Debug)]
pub enum Found {
    /// It has no entry.
    Void,
    /// In memory.
    Cached(Arc<Page>),
    /// On the device.
    At(Fetch),
}

/// A leaf to read from the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetch {
    /// The leaf.
    pub leaf: u64,
    /// Page of the device.
    pub place: u64,
    node: Node,
}

/// What reading a leaf brought.
#[derive(Debug)]
pub enum Checked {
    /// The leaf, as it was when the fetch was made.
    Right(Arc<Page>),
    /// It was written since: it must be looked for again.
    Changed,
}

/// A leaf that was written to a copy.
#[derive(Debug)]
pub struct Written {
    /// The leaf.
    pub leaf: u64,
    /// Its page and the copy that has it; None: it became void.
    pub page: Option<(Arc<Page>, u8)>,
}

/// Copies of the leaves of one page of nodes.
#[derive(Debug)]
struct HeldCopies {
    /// The copy on the device that the last checkpoint names.
    current: Option<u8>,
    /// By leaf: zero is void, else one more than its current copy.
    states: [u8; NODES_PER_PAGE as usize],
}

#[derive(Debug)]
struct State {
    tree: Tree,
    pages: Vec<Option<Box<HeldCopies>>>,
    /// Pages of nodes that the last checkpoint lacks.
    dirty: BTreeSet<u64>,
    /// By region: leaves that aren't void, and where its pages are void before.
    held: Vec<u64>,
    void_since: Box<[u64; REGIONS]>,
    cache: Cache<u64, Arc<Page>>,
}

/// The leaves of a store.
#[derive(Debug)]
pub struct Leaves {
    geometry: Geometry,
    key: Arc<NodeKey>,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

impl Leaves {
    /// Leaves that are all void.
    #[must_use]
    pub fn new(geometry: Geometry, key: NodeKey, counters: Arc<Counters>) -> Self {
        let key = Arc::new(key);
        let state = State {
            tree: Tree::new(Arc::clone(&key), geometry.leaves()),
            pages: (0..geometry.node_pages()).map(|_| None).collect(),
            dirty: BTreeSet::new(),
            held: vec![0; REGIONS],
            void_since: Box::new([0; REGIONS]),
            cache: Cache::new(CACHE_PAGES),
        };
        Self { geometry, key, counters, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds it can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region(&self, page: u64) -> usize {
        (page / self.geometry.region_pages()) as usize
    }

    // Questions.

    /// Where a leaf is.
    #[must_use]
    pub fn find(&self, leaf: u64) -> Found {
        let state = self.state();
        let Some((node, copy)) = state.current(leaf) else { return Found::Void };
        if let Some(page) = state.cache.get(&leaf) {
            count(&self.counters.leaf_hits, 1);
            return Found::Cached(Arc::clone(page));
        }
        count(&self.counters.leaf_misses, 1);
        Found::At(Fetch { leaf, place: self.geometry.leaf(leaf, copy), node })
    }

    /// Where a leaf is on the device, also if it is in memory; None: void.
    #[must_use]
    pub fn fetch(&self, leaf: u64) -> Option<Fetch> {
        let (node, copy) = self.state().current(leaf)?;
        Some(Fetch { leaf, place: self.geometry.leaf(leaf, copy), node })
    }

    /// A leaf's page if it is in memory.
    #[must_use]
    pub fn cached(&self, leaf: u64) -> Option<Arc<Page>> {
        self.state().cache.peek(&leaf).cloned()
    }

    /// Leaf pages in memory.
    #[must_use]
    pub fn cached_pages(&self) -> u64 {
        self.state().cache.len() as u64
    }

    /// The node of a leaf; None: void.
    #[must_use]
    pub fn node(&self, leaf: u64) -> Option<Node> {
        self.state().tree.node(leaf)
    }

    /// A leaf's page and the node that stands for it, of a page that was found in the cache or
    /// checked just now; None if it was written since, or is void.
    #[must_use]
    pub fn with_node(&self, leaf: u64, page: &Page) -> Option<Leaf> {
        Leaf::check(&self.key, leaf, Box::new(page.0), self.node(leaf)).ok()
    }

    /// Checks a leaf that was read, and keeps it in memory. An error if it isn't what was written
    /// last.
    pub fn check(&self, fetch: &Fetch, page: Page) -> Result<Checked, Refusal> {
        self.checked(fetch, &page, true)
    }

    /// The same for who won't need it again: nothing is kept.
    pub fn check_only(&self, fetch: &Fetch, page: Page) -> Result<Checked, Refusal> {
        self.checked(fetch, &page, false)
    }

    fn checked(&self, fetch: &Fetch, page: &Page, keeps: bool) -> Result<Checked, Refusal> {
        let is_right = self.key.leaf_node(fetch.leaf, &page.0) == Some(fetch.node);
        let mut state = self.state();
        let is_current = state.tree.node(fetch.leaf) == Some(fetch.node);
        if !is_right {
            let stale = Refusal::StaleLeaf(fetch.leaf);
            return if is_current { Err(stale) } else { Ok(Checked::Changed) };
        }
        let page = Arc::new(*page);
        if keeps && is_current {
            state.cache.insert(fetch.leaf, Arc::clone(&page));
        }
        Ok(Checked::Right(page))
    }

    /// The copy to write a leaf to: the one that the last checkpoint doesn't need.
    #[must_use]
    pub fn spare_copy(&self, leaf: u64) -> u8 {
        self.state().current(leaf).map_or(0, |(_, copy)| 1 - copy)
    }

    /// The first leaf in the range that isn't void.
    #[must_use]
    pub fn next_held(&self, start: u64, end: u64) -> Option<u64> {
        let state = self.state();
        let mut leaf = start;
        while leaf < end {
            match &state.pages[(leaf / NODES_PER_PAGE) as usize] {
                Some(page) if page.states[(leaf % NODES_PER_PAGE) as usize] != 0 => {
                    return Some(leaf);
                }
                Some(_) => leaf += 1,
                None => leaf = (leaf / NODES_PER_PAGE + 1) * NODES_PER_PAGE,
            }
        }
        None
    }

    /// The tree's root, and root commits since the store was opened.
    #[must_use]
    pub fn root(&self) -> Root {
        self.state().tree.root()
    }

    /// Where regions are void before.
    #[must_use]
    pub fn void_since(&self) -> Box<[u64; REGIONS]> {
        self.state().void_since.clone()
    }

    // Changes.

    /// Takes over leaves that were written, sorted.
    pub fn written(&self, leaves: &[Written]) {
        let node = |written: &Written| {
            let page = written.page.as_ref();
            (written.leaf, page.and_then(|(page, _)| self.key.leaf_node(written.leaf, &page.0)))
        };
        let nodes: Vec<_> = leaves.iter().map(node).collect();
        let mut state = self.state();
        state.tree.update(&nodes);
        for Written { leaf, page } in leaves {
            let index = leaf / NODES_PER_PAGE;
            let place = &mut state.pages[index as usize];
            let held = place.get_or_insert_with(HeldCopies::void);
            let held = &mut held.states[(leaf % NODES_PER_PAGE) as usize];
            let copy_state = page.as_ref().map_or(0, |(_, copy)| copy + 1);
            let before = std::mem::replace(held, copy_state);
            let region = self.region(index);
            state.held[region] += u64::from(copy_state != 0);
            state.held[region] -= u64::from(before != 0);
            state.dirty.insert(index);
            match page {
                Some((page, _)) => state.cache.insert(*leaf, Arc::clone(page)),
                None => drop(state.cache.remove(leaf)),
            }
        }
    }

    /// Has every leaf page read from the device again.
    #[cfg(test)]
    pub fn forget_pages(&self) {
        self.state().cache.clear();
    }

    // Checkpoints.

    /// Begins a checkpoint: the pages of nodes that it has to write. Regions in which every leaf is
    /// void are noted as such and cost nothing.
    pub fn begin_checkpoint(&self, number: u64) -> Vec<u64> {
        let mut state = self.state();
        let dirty = std::mem::take(&mut state.dirty);
        let mut indices = Vec::new();
        for index in dirty {
            let region = self.region(index);
            if state.held[region] > 0 {
                indices.push(index);
            } else if state.void_since[region] != number + 1 {
                // Of this number, a page of a checkpoint that was not completed may lie about.
                state.void_since[region] = number + 1;
                let first = region as u64 * self.geometry.region_pages();
                let end = self.geometry.node_pages().min(first + self.geometry.region_pages());
                state.pages[first as usize..end as usize].fill_with(|| None);
            }
        }
        indices
    }

    /// A page of nodes as the checkpoint of that number has it, and where to write it.
    #[must_use]
    pub fn node_page(&self, number: u64, index: u64) -> Option<(NodePage, u64)> {
        let mut state = self.state();
        let State { tree, pages, .. } = &mut *state;
        let held = pages[index as usize].as_mut()?;
        let leaves = (index * NODES_PER_PAGE..).zip(&held.states).map(|(leaf, state)| {
            let copy = state.checked_sub(1)?;
            Some(Held { node: tree.node(leaf)?, copy })
        });
        let page = NodePage { number, index, leaves: leaves.collect() };
        let copy = held.current.map_or(0, |copy| 1 - copy);
        held.current = Some(copy);
        Some((page, self.geometry.nodes(index, copy)))
    }

    // Opening.

    /// Takes the regions of a checkpoint, before its pages.
    pub fn load_regions(&self, void_since: &[u64; REGIONS]) {
        self.state().void_since.copy_from_slice(void_since);
    }

    /// Takes the copies of a page of nodes as the device has them, of which the latest that belongs
    /// to the checkpoint of that number, or an earlier one, counts.
    pub fn load(&self, number: u64, index: u64, copies: [Option<NodePage>; 2]) {
        let mut state = self.state();
        let void_since = state.void_since[self.region(index)];
        let mut last: Option<(u8, NodePage)> = None;
        for (copy, page) in (0..).zip(copies) {
            let Some(page) = page.filter(|page| page.index == index) else { continue };
            if page.number > number {
                // Of a checkpoint that was not completed. The next one writes over it, or a later
                // opening would take it for a part of one that was.
                state.dirty.insert(index);
            } else if page.number >= void_since
                && last.as_ref().is_none_or(|(_, last)| last.number < page.number)
            {
                last = Some((copy, page));
            }
        }
        let Some((copy, page)) = last else {
            if state.dirty.contains(&index) {
                state.pages[index as usize] = Some(HeldCopies::void());
            }
            return;
        };
        let mut held = HeldCopies::void();
        held.current = Some(copy);
        let leaves = index * NODES_PER_PAGE..self.geometry.leaves();
        let leaves = leaves.zip(page.leaves).zip(&mut held.states);
        let nodes = leaves.filter_map(|((leaf, found), state)| {
            let found = found?;
            *state = found.copy + 1;
            Some((leaf, Some(found.node)))
        });
        let nodes: Vec<_> = nodes.collect();
        state.tree.update(&nodes);
        let region = self.region(index);
        state.held[region] += nodes.len() as u64;
        state.pages[index as usize] = Some(held);
    }
}

impl State {
    fn current(&self, leaf: u64) -> Option<(Node, u8)> {
        let page = self.pages.get((leaf / NODES_PER_PAGE) as usize)?.as_ref()?;
        let copy = page.states[(leaf % NODES_PER_PAGE) as usize].checked_sub(1)?;
        Some((self.tree.node(leaf)?, copy))
    }
}

impl HeldCopies {
    fn void() -> Box<Self> {
        Box::new(Self { current: None, states: [0; NODES_PER_PAGE as usize] })
    }
}
