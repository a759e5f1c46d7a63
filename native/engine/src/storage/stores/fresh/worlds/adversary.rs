//! Attacks by the owner of a device, who has everything that was ever stored on it, and everything
//! public.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, DATA_BYTES, METADATA_BYTES, field, metadata, metadata_mut,
};

use super::super::super::pages::Page;
use super::super::geometry::Geometry;
use super::super::keys::{Authority, Kind, StoreKeys};
use super::machine::{Device, Image};
use super::{SUPERBLOCK_SEED, SUPERBLOCK_UUID, chance, device_pages, pick};

/// Kinds of attack.
pub const ATTACKS: [&str; 9] = [
    "whole device rolled back",
    "areas rolled back",
    "pages rolled back",
    "pages exchanged",
    "bits flipped",
    "pages forged with public data",
    "writes dropped",
    "all further writes dropped",
    "fast-path MACs moved",
];
/// Most pages changed by one attack.
const PAGES_MAX: u64 = 6;
/// Most snapshots kept.
const SNAPSHOTS_MAX: usize = 12;

pub struct Adversary {
    geometry: Geometry,
    snapshots: Vec<Image>,
    /// Number of attacks of each kind.
    pub made: [u64; ATTACKS.len()],
}

impl Adversary {
    pub fn new(geometry: Geometry) -> Self {
        Self { geometry, snapshots: Vec::new(), made: [0; ATTACKS.len()] }
    }

    /// Takes a snapshot of the device.
    pub fn snapshot(&mut self, device: &Device, random: &mut ChaCha8Rng) {
        if self.snapshots.len() == SNAPSHOTS_MAX {
            self.snapshots.swap_remove(pick(random, SNAPSHOTS_MAX));
        }
        self.snapshots.push(device.image());
    }

    /// Checkpoints, log, node pages, leaf pages, blocks.
    fn areas(&self) -> [std::ops::Range<u64>; 5] {
        let geometry = &self.geometry;
        let [log, nodes, leaves, slots] =
            [geometry.log(0), geometry.nodes(0, 0), geometry.leaf(0, 0), geometry.slot(0)];
        [1..log, log..nodes, nodes..leaves, leaves..slots, slots..device_pages(geometry)]
    }

    /// A page that was ever written; each area is equally likely, so metadata is chosen more often
    /// than blocks.
    fn page(&self, device: &Device, random: &mut ChaCha8Rng) -> u64 {
        self.page_of(device, pick(random, 5), random)
    }

    fn page_of(&self, device: &Device, area: usize, random: &mut ChaCha8Rng) -> u64 {
        let area = self.areas()[area].clone();
        let written = device.written(area.clone());
        if written.is_empty() { area.start } else { written[pick(random, written.len())] }
    }

    pub fn attack(&mut self, device: &Device, random: &mut ChaCha8Rng) {
        let kind = pick(random, ATTACKS.len());
        let is_lasting = chance(random, 30);
        let count = 1 + random.next_u64() % PAGES_MAX;
        match kind {
            0 | 1 if self.snapshots.is_empty() => return,
            0 | 1 => {
                let snapshot = &self.snapshots[pick(random, self.snapshots.len())];
                for area in self.areas() {
                    if kind == 0 || chance(random, 50) {
                        for page in area {
                            device.lie(page, snapshot[page as usize].clone(), is_lasting);
                        }
                    }
                }
            }
            2 => (0..count).for_each(|_| {
                let page = self.page(device, random);
                let past = device.past(page);
                if !past.is_empty() {
                    device.lie(page, Some(Arc::clone(&past[pick(random, past.len())])), is_lasting);
                }
            }),
            3 => {
                let area = pick(random, 5);
                let [left, right] = [(); 2].map(|()| self.page_of(device, area, random));
                let (at_left, at_right) = (device.answer(left), device.answer(right));
                device.lie(left, at_right, is_lasting);
                device.lie(right, at_left, is_lasting);
            }
            4 => (0..count).for_each(|_| self.change(device, random, is_lasting, flip)),
            5 => (0..count).for_each(|_| self.change(device, random, is_lasting, forge)),
            6 => (0..count).for_each(|_| {
                let page = self.page(device, random);
                device.lie(page, device.answer(page), true);
            }),
            7 => (0..device_pages(&self.geometry)).for_each(|page| {
                device.lie(page, device.answer(page), true);
            }),
            _ => self.move_mac(device, random, is_lasting),
        }
        self.made[kind] += 1;
    }

    fn change(
        &self,
        device: &Device,
        random: &mut ChaCha8Rng,
        is_lasting: bool,
        change: impl Fn(&mut Block, &mut ChaCha8Rng),
    ) {
        let number = self.page(device, random);
        if let Some(block) = device.answer(number) {
            let mut block = *block;
            change(&mut block, random);
            device.lie(number, Some(Arc::new(block)), is_lasting);
        }
    }

    /// Gives an older version of a block a MAC that some version of it or of another block has.
    fn move_mac(&self, device: &Device, random: &mut ChaCha8Rng, is_lasting: bool) {
        let [to, from] = [(); 2].map(|()| self.page_of(device, 4, random));
        let from = if chance(random, 50) { to } else { from };
        let (olds, macs) = (device.past(to), device.past(from));
        if olds.is_empty() || macs.is_empty() {
            return;
        }
        let mut old = *olds[pick(random, olds.len())];
        let mac = metadata(&macs[pick(random, macs.len())], field::MAC).to_vec();
        metadata_mut(&mut old, field::MAC).copy_from_slice(&mac);
        device.lie(to, Some(Arc::new(old)), is_lasting);
    }
}

/// Flips a bit, in metadata as often as in data.
fn flip(block: &mut Block, random: &mut ChaCha8Rng) {
    let at = [pick(random, DATA_BYTES), BLOCK_BYTES - 1 - pick(random, METADATA_BYTES)];
    block[at[pick(random, 2)]] ^= 1 << pick(random, 8);
}

/// Changes a number in a page, and seals the page with keys from public data.
fn forge(block: &mut Block, random: &mut ChaCha8Rng) {
    let keys = StoreKeys::new(&SUPERBLOCK_UUID, &SUPERBLOCK_SEED, &Authority::Device);
    let mut page = Page::ZERO;
    page.0.copy_from_slice(&block[..DATA_BYTES]);
    let at = 8 * pick(random, 40);
    let field = &mut page.0[at..at + 8];
    let number = u64::from_le_bytes(field.try_into().unwrap_or_default());
    let number =
        [number.wrapping_add(1), number.wrapping_sub(1), random.next_u64()][pick(random, 3)];
    field.copy_from_slice(&number.to_le_bytes());
    match pick(random, 3) {
        0 => drop(keys.pages().seal(Kind::Checkpoint, &mut page)),
        1 => drop(keys.pages().seal(Kind::Nodes, &mut page)),
        _ => drop(keys.log(number, &[0; 16]).seal(Kind::Log, &mut page)),
    }
    block[..DATA_BYTES].copy_from_slice(&page.0);
}
