//! First page of a store: written once, when the store is created.

use std::io;

use super::super::pages::{BlockFile, Page};
use super::codec::{Fields, get, get_u64};
use super::geometry::Geometry;
use super::keys::{Authority, Kind, StoreKeys};

/// First bytes of the superblock.
const MAGIC: [u8; 8] = *b"SEALSTOR";
/// Version of this layout.
const VERSION: u32 = 5;

/// Names a store and gives its sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Identifies the store.
    pub uuid: [u8; 16],
    /// The root of its keys, or what makes that of a secret this layout's own.
    pub seed: [u8; 32],
    /// Its sizes when it was created: what it has grown by since, its checkpoint says.
    pub geometry: Geometry,
}

impl Superblock {
    /// The page.
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

    /// Parses the page without checking it: what it claims to be. The error says what it is instead.
    pub fn claimed(page: &Page) -> io::Result<Self> {
        let refuse = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC {
            return refuse("not a Sealane store".into());
        }
        let version = u32::from_le_bytes(get(rest));
        if version != VERSION {
            let detail = format!(
                "a Sealane store of version {version}, and this release has version {VERSION}: \
                 copy its volume with the release that wrote it"
            );
            return refuse(detail);
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

    /// Parses and checks the page; also the keys of the rest.
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

    /// Reads and checks the superblock of a store; also the keys of the rest.
    pub fn read(file: &dyn BlockFile, authority: &Authority<'_>) -> io::Result<(Self, StoreKeys)> {
        let mut page = [Page::ZERO];
        file.read(0, &mut page)?;
        Self::decode(&page[0], authority)
    }

    /// Reads what a store's superblock claims, which nothing vouches for.
    pub fn read_claimed(file: &dyn BlockFile) -> io::Result<Self> {
        let mut page = [Page::ZERO];
        file.read(0, &mut page)?;
        Self::claimed(&page[0])
    }
}
