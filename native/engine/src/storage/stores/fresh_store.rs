//! What stores of sealed blocks that keep freshness have in common, wherever they put the blocks.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::aead::Secret;
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::Openings;

use super::super::events::EventLog;
use super::super::store::{BLOCK_BYTES, BlockStore, StoreChannel, StoreCounters};
use super::super::upkeep::Upkeep;
use super::fresh::anchor::Anchor;
use super::fresh::geometry::Geometry;
use super::fresh::journal::{Journal, Requests};
use super::fresh::keys::Authority;
use super::fresh::map::{Layout, Map};
use super::fresh::opening::Opening;
use super::fresh::superblock::Superblock;
use super::pages::{BlockFile, Page, random};

/// Who can make a store's pages, and who remembers how far it has come.
#[derive(Debug, Default)]
pub struct Trust<'a> {
    /// The store's secret; None: its keys lie on the device.
    pub secret: Option<&'a Secret>,
    /// Its anchor; None: a whole older state passes.
    pub anchor: Option<Arc<dyn Anchor>>,
    /// Who watches how far an opening is.
    pub opening: Option<&'a Opening>,
    /// Whether the device is to keep room for all blocks. Without it, it keeps room for what the
    /// store writes by itself, and a write may meet a full device.
    pub reserves: bool,
}

impl Trust<'_> {
    pub(super) fn authority(&self) -> Authority<'_> {
        self.secret.map_or(Authority::Device, Authority::Secret)
    }
}

/// Where a store's pages and blocks are.
pub trait Place: Debug + Send + Sync + Sized + 'static {
    /// How blocks lie there.
    type Layout: Layout;
    /// The same, for people.
    const LAYOUT: &'static str;
    /// The pages.
    fn file(&self) -> io::Result<Arc<dyn BlockFile>>;
    /// Refuses a device that has no room for so much.
    fn check_size(&self, geometry: &Geometry) -> io::Result<()>;
    /// Gives the device room for so much, where it can grow; nothing uses it meanwhile.
    fn extend(&self, geometry: &Geometry) -> io::Result<()>;
    /// A channel to a store there, which asks for flushes and room at `requests`.
    fn channel(
        shared: &Arc<Shared<Self>>,
        requests: &Arc<Requests>,
    ) -> io::Result<Box<dyn StoreChannel>>;
    /// Who looks after a store there, for one job.
    fn upkeep(shared: &Arc<Shared<Self>>) -> io::Result<Box<dyn Upkeep>>;
}

/// What the channels of a store share.
#[derive(Debug)]
pub struct Shared<P: Place> {
    /// Where the blocks are.
    pub place: P,
    /// What is known of them.
    pub map: Arc<Map<P::Layout>>,
    /// What hosts did.
    pub counters: StoreCounters,
}

/// A store of sealed blocks. Dropping it flushes.
#[derive(Debug)]
pub struct FreshStore<P: Place> {
    pub(super) shared: Arc<Shared<P>>,
    /// None after it could not be started again: nothing is made durable any more.
    journal: Option<Journal>,
    /// Whether the device keeps room for all blocks.
    reserves: bool,
}

/// What of a store its device keeps room for.
fn room(geometry: &Geometry, reserves: bool) -> Range<u64> {
    let own = geometry.own_pages();
    if reserves { own.start..geometry.device_pages() } else { own }
}

impl<P: Place> FreshStore<P> {
    /// Lays out an empty store, whatever the place held.
    pub(super) fn lay_out(
        place: P,
        uuid: [u8; 16],
        geometry: Geometry,
        trust: &Trust<'_>,
    ) -> io::Result<Self> {
        let superblock = Superblock { uuid, seed: random()?, geometry };
        place.check_size(&superblock.geometry)?;
        let file = place.file()?;
        file.reserve(room(&superblock.geometry, trust.reserves))?;
        let map = Map::create(file, &superblock, &trust.authority(), trust.anchor.clone())?;
        Self::start(place, map, trust.reserves)
    }

    /// Opens a store and brings it to the state that its last flush, at least, left. An error with
    /// [`Refusal::RolledBack`](super::fresh::failure::Refusal) if its anchor knows of a later one.
    pub(super) fn take_up(place: P, trust: &Trust<'_>) -> io::Result<Self> {
        let file = place.file()?;
        let (superblock, keys) = Superblock::read(&*file, &trust.authority())?;
        let (anchor, nobody) = (trust.anchor.clone(), Opening::default());
        let opening = trust.opening.unwrap_or(&nobody);
        let check = |geometry: &Geometry| place.check_size(geometry);
        let map = Map::open_watched(file, &superblock, keys, anchor, opening, check)?;
        Self::start(place, map, trust.reserves)
    }

    /// Its map, for tests.
    #[cfg(test)]
    pub(super) fn map(&self) -> &Map<P::Layout> {
        &self.shared.map
    }

    fn start(place: P, map: Map<P::Layout>, reserves: bool) -> io::Result<Self> {
        let map = Arc::new(map);
        let journal = Some(Journal::start(Arc::clone(&map))?);
        let shared = Shared { place, map, counters: StoreCounters::default() };
        Ok(Self { shared: Arc::new(shared), journal, reserves })
    }
}

impl<P: Place> BlockStore for FreshStore<P> {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.map.geometry().block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let Some(journal) = &self.journal else {
            return Err(io::Error::other("the store is closed"));
        };
        P::channel(&self.shared, journal.requests())
    }

    fn layout(&self) -> &'static str {
        P::LAYOUT
    }

    fn tell_events(&self, events: &Arc<EventLog>) {
        self.shared.map.tell_events(events);
    }

    fn milestone(&self) -> Option<Milestone> {
        Some(self.shared.map.milestone())
    }

    fn contains(&self, told: &Milestone) -> bool {
        self.shared.map.contains(told)
    }

    fn mark(&self) -> u64 {
        self.shared.map.mark()
    }

    fn openings(&self) -> Option<Openings> {
        Some(self.shared.map.openings())
    }

    fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        P::upkeep(&self.shared).map(Some)
    }

    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let shared = Arc::get_mut(&mut self.shared).ok_or_else(in_use)?;
        if shared.map.geometry().block_count >= block_count {
            // A growth that its anchor had not answered to is anchored now.
            return shared.map.finish();
        }
        let geometry = shared.map.grown_to(block_count)?;
        shared.place.extend(&geometry)?;
        shared.place.file()?.reserve(room(&geometry, self.reserves))?;
        // Its end flushes, and leaves the map to this thread.
        self.journal = None;
        let grown = Arc::get_mut(&mut shared.map).ok_or_else(in_use)?.grow(geometry);
        self.journal = Some(Journal::start(Arc::clone(&shared.map))?);
        grown
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        let mut named = self.shared.counters.by_name();
        named.extend(self.shared.map.statistics());
        named
    }
}

/// The refusal of a store that somebody uses.
pub(super) fn in_use() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "the store is in use: it can't grow now")
}

/// A UUID that nobody else has (RFC 9562: version 4, variant 10).
pub(super) fn new_uuid() -> io::Result<[u8; 16]> {
    let mut uuid: [u8; 16] = random()?;
    uuid[6] = uuid[6] & 0x0F | 0x40;
    uuid[8] = uuid[8] & 0x3F | 0x80;
    Ok(uuid)
}

/// Refuses a device whose first page isn't zeros: anything else may be somebody's data.
pub(super) fn check_empty(file: &dyn BlockFile) -> io::Result<()> {
    let mut first = [Page::ZERO];
    file.read(0, &mut first)?;
    if first == [Page::ZERO] {
        return Ok(());
    }
    let detail = "the device holds something: its first 4096 bytes are not zeros";
    Err(io::Error::new(io::ErrorKind::AlreadyExists, detail))
}

/// Refuses a device that holds no store of that name; no key is needed to.
pub(super) fn check_name(file: &dyn BlockFile, uuid: [u8; 16]) -> io::Result<()> {
    if Superblock::read_claimed(file)?.uuid == uuid {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the device holds another store"))
}
