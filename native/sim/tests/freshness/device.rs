//! The device of the model. An honest one loses pages only in a power cut; a hostile one answers a
//! read with any page that was ever written at the address.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::milestone::Passage;

/// Model of an unforgeable keyed hash: equal exactly if its inputs are equal.
pub type Tag = u64;

pub fn tag(over: impl Hash) -> Tag {
    let mut hasher = DefaultHasher::new();
    over.hash(&mut hasher);
    hasher.finish()
}

/// Version of a sector; each write of a run has a different one. 0: never written.
pub type Version = u8;
/// Number of sectors in the model; one leaf page has them all.
pub const SECTORS: usize = 2;

/// A version and its slot; in place, the slot is the sector's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Entry {
    pub version: Version,
    pub slot: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    Checkpoint(u8),
    Log(u8),
    Leaf(u8),
    Data(u8),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Checkpoint {
    pub number: u8,
    pub epoch: u8,
    /// Drawn by each opening.
    pub nonce: u8,
    /// The copy of the leaf page that is in use, and its node.
    pub copy: u8,
    pub node: Tag,
    pub log_start: u8,
    /// Start of the chain of tags: input to the tag of the first log page.
    pub chain: Tag,
    /// Log pages before this one are flushed.
    pub log_flushed: u8,
    /// Empty in worlds without a gateway.
    pub passage: Passage,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPage {
    pub epoch: u8,
    pub number: u8,
    /// Pages before this number were flushed when the page was written.
    pub flushed: u8,
    pub sector: u8,
    pub entry: Entry,
    pub tag: Tag,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Page {
    Checkpoint(Checkpoint),
    Log(LogPage),
    Leaf([Entry; SECTORS]),
    /// A block, which can't be forged; `fast` is its fast-path MAC, 0 if none.
    Data {
        sector: u8,
        version: Version,
        fast: Tag,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Device {
    Honest {
        durable: BTreeMap<Address, Page>,
        /// Written since the last sync.
        cached: Vec<(Address, Page)>,
        /// Writes issued by a killed process that may still reach the device.
        late: Vec<(Address, Page)>,
    },
    Hostile {
        written: BTreeMap<Address, BTreeSet<Page>>,
    },
}

impl Device {
    pub fn honest() -> Self {
        Self::Honest { durable: BTreeMap::new(), cached: Vec::new(), late: Vec::new() }
    }

    pub fn hostile() -> Self {
        Self::Hostile { written: BTreeMap::new() }
    }

    pub fn is_honest(&self) -> bool {
        matches!(self, Self::Honest { .. })
    }

    pub fn write(&mut self, address: Address, page: Page) {
        match self {
            Self::Honest { cached, .. } => cached.push((address, page)),
            Self::Hostile { written } => {
                written.entry(address).or_default().insert(page);
            }
        }
    }

    pub fn sync(&mut self) {
        if let Self::Honest { durable, cached, .. } = self {
            durable.extend(std::mem::take(cached));
        }
    }

    /// All possible answers to a read of the address; None is a page that was never written.
    pub fn read(&self, address: Address) -> Vec<Option<Page>> {
        match self {
            Self::Honest { durable, cached, .. } => {
                let cached = cached.iter().rev().find(|(at, _)| *at == address);
                vec![cached.map(|(_, page)| page).or_else(|| durable.get(&address)).cloned()]
            }
            Self::Hostile { written } => {
                let pages = written.get(&address).into_iter().flatten().cloned();
                pages.map(Some).chain([None]).collect()
            }
        }
    }

    /// All possible devices after a power cut, which may lose writes in the cache and in flight.
    pub fn power_cuts(&self, in_flight: &[(Address, Page)]) -> Vec<Self> {
        let Self::Honest { durable, cached, late } = self else { return vec![self.clone()] };
        let mut choices: BTreeMap<Address, Vec<Option<&Page>>> = BTreeMap::new();
        for (address, page) in cached.iter().chain(late).chain(in_flight) {
            choices.entry(*address).or_insert_with(|| vec![None]).push(Some(page));
        }
        let mut images = vec![durable.clone()];
        for (address, pages) in choices {
            let kept = |image: &BTreeMap<Address, Page>, page: Option<&Page>| {
                let mut image = image.clone();
                image.extend(page.map(|page| (address, page.clone())));
                image
            };
            images = images
                .iter()
                .flat_map(|image| pages.iter().map(move |page| (image, *page)))
                .map(|(image, page)| kept(image, page))
                .collect();
        }
        let device = |durable| Self::Honest { durable, cached: Vec::new(), late: Vec::new() };
        images.into_iter().map(device).collect()
    }
}
