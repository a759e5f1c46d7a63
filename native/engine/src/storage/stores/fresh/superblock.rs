//! The first page of a store, written once, at its creation.

use std::io;

use super::super::pages::{BlockFile, Page};
use super::codec::{Fields, get, get_u64};
use super::geometry::Geometry;
use super::keys::{Authority, Kind, StoreKeys};

/// First bytes of the superblock.
const MAGIC: [u8; 8] = *b"SEALSTOR";
/// Version of the store's layout.
const VERSION: u32 = 5;

/// Identity and original sizes of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Identifies the store.
    pub uuid: [u8; 16],
    /// The root of the store's keys or, with a secret, what makes its keys unique.
    pub seed: [u8; 32],
    /// Its sizes at creation: checkpoints contain its growths.
    pub geometry: Geometry,
}

/// What to say of a store's version that isn't this release's, and what to do.
#[must_use]
pub fn other_version(found: u32, own: u32) -> String {
    let way_out = if found > own {
        "start the release that wrote it, or a later one"
    } else {
        "copy its volume with the release that wrote it"
    };
    format!("a Sealane store of version {found}, and this release has version {own}: {way_out}")
}

impl Superblock {
    /// Encodes and seals the page.
    #[must_use]
    pub fn encode(&self, keys: &StoreKeys) -> Page {
        let mut page = Page::ZERO;
        let mut fields = Fields::new(&mut page);
        fields.put(&MAGIC);
        fields.put(&VERSION.to_le_bytes());
        fields.put(&[0; 4]);
        fields.put(&self.uuid);
        fields.put(&self.seed);
        let Geometry { block_count, leaf_entries, slot_count, log_pages, pending_max, .. } =
            self.geometry;
        for count in [block_count, leaf_entries, slot_count, log_pages, pending_max] {
            fields.put_u64(count);
        }
        keys.pages().seal(Kind::Superblock, &mut page);
        page
    }

    /// Parses the unauthenticated fields. Fails if the page is no superblock of this version.
    pub fn claimed(page: &Page) -> io::Result<Self> {
        let refuse = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC {
            return refuse("not a Sealane store".into());
        }
        let version = u32::from_le_bytes(get(rest));
        if version != VERSION {
            return refuse(other_version(version, VERSION));
        }
        let _: [u8; 4] = get(rest);
        let (uuid, seed) = (get(rest), get(rest));
        let [block_count, leaf_entries, slot_count, log_pages, pending_max] =
            [(); 5].map(|()| get_u64(rest));
        let earlier = Vec::new();
        let geometry =
            Geometry { block_count, leaf_entries, slot_count, log_pages, pending_max, earlier };
        Ok(Self { uuid, seed, geometry })
    }

    /// Parses and authenticates the page. Returns it with the store's keys.
    pub fn decode(page: &Page, authority: &Authority<'_>) -> io::Result<(Self, StoreKeys)> {
        let claimed = Self::claimed(page)?;
        let keys = StoreKeys::new(&claimed.uuid, &claimed.seed, authority);
        if keys.pages().check(Kind::Superblock, page).is_none() {
            let detail = match authority {
                Authority::Device => "superblock of a Sealane store is damaged",
                Authority::Secret(_) => "superblock of a Sealane store is damaged or forged",
            };
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        Ok((claimed, keys))
    }

    /// Reads and authenticates the superblock of a store. Returns it with the store's keys.
    pub fn read(file: &dyn BlockFile, authority: &Authority<'_>) -> io::Result<(Self, StoreKeys)> {
        let mut page = [Page::ZERO];
        file.read(0, &mut page)?;
        Self::decode(&page[0], authority)
    }

    /// Reads the superblock of a store without authenticating it.
    pub fn read_claimed(file: &dyn BlockFile) -> io::Result<Self> {
        let mut page = [Page::ZERO];
        file.read(0, &mut page)?;
        Self::claimed(&page[0])
    }
}
