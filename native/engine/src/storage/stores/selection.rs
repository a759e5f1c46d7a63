//! Creates or opens the store that a configuration describes.

use std::io;
use std::path::Path;

use super::super::store::BlockStore;
use super::emulated::{EmulatedStore, Profile};
use super::fresh_store::Trust;
use super::in_place_store::{InPlaceStore, raw_blocks};
use super::inline_file::InlineFileStore;
use super::memory::MemoryStore;
use super::nvme::NvmeStore;
use super::plain_file::PlainFileStore;
use super::sealed_file::SealedFileStore;

/// Where and how a namespace stores its blocks.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own, given by name")]
pub struct StoreOptions<'a> {
    /// "memory", "emulated", "file", "inline" or "nvme".
    pub kind: &'a str,
    /// Blocks of the namespace.
    pub block_count: u64,
    /// Whether blocks have 64 bytes of metadata.
    pub is_sealed: bool,
    /// File or device, for the kinds that use one.
    pub path: Option<&'a Path>,
    /// Whether to lay out an empty store, rather than open one.
    pub creates: bool,
    /// The drive to emulate.
    pub drive: Option<&'a str>,
    /// Whether blocks may be overwritten in place.
    pub in_place: bool,
    /// Whether the store keeps sealed blocks fresh.
    pub is_fresh: bool,
    /// Secret and anchor of a store that keeps freshness on a device, and further options.
    pub trust: &'a Trust<'a>,
}

/// Creates or opens a store. `InvalidInput` for options that don't fit together.
pub fn open(options: &StoreOptions<'_>) -> io::Result<Box<dyn BlockStore>> {
    let StoreOptions { kind, block_count, is_sealed, creates, is_fresh, trust, .. } = *options;
    // Blocks with their own metadata are overwritten in place; their freshness data lies in front.
    let is_in_place = is_sealed && is_fresh && matches!(kind, "emulated" | "inline" | "nvme");
    let uses_trust = is_in_place || is_sealed && kind == "file";
    if !uses_trust && (trust.anchor.is_some() || trust.secret.is_some()) {
        let detail = format!("store {kind:?} has no use for a secret or an anchor");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
    }
    let store = if is_in_place {
        let store = if creates && kind == "nvme" {
            // Blocks that an empty tree doesn't refer to may hold anything. An existing store is
            // refused.
            InPlaceStore::create(open_whole(options)?, block_count, trust)?
        } else if creates {
            let raw = open_raw(&StoreOptions { block_count: raw_blocks(block_count), ..*options })?;
            InPlaceStore::create(raw, block_count, trust)?
        } else {
            InPlaceStore::open(open_whole(options)?, trust)?
        };
        Box::new(store)
    } else {
        let store = open_raw(options)?;
        if creates && trust.reserves {
            store.reserve(0..block_count)?;
        }
        store
    };
    let can_be_larger = uses_trust && is_fresh && !creates;
    check_size(&*store, block_count, can_be_larger)?;
    Ok(store)
}

fn open_raw(options: &StoreOptions<'_>) -> io::Result<Box<dyn BlockStore>> {
    let StoreOptions {
        kind, block_count, is_sealed, path, creates, drive, in_place, trust, ..
    } = *options;
    Ok(match (kind, is_sealed, path, drive) {
        ("memory", _, None, None) if creates && !in_place => {
            Box::new(MemoryStore::new(block_count, is_sealed))
        }
        ("emulated", _, None, Some(drive)) if creates && !in_place => {
            Box::new(EmulatedStore::new(block_count, is_sealed, &Profile::parse(drive)?))
        }
        ("file", true, Some(path), None) if creates && !in_place => {
            Box::new(SealedFileStore::create(path, block_count, trust)?)
        }
        ("file", true, Some(path), None) if !in_place => {
            Box::new(SealedFileStore::open(path, trust)?)
        }
        // Plain blocks are always in place, whether or not the options say so.
        ("file", false, Some(path), None) if creates => {
            Box::new(PlainFileStore::create(path, block_count)?)
        }
        ("file", false, Some(path), None) => Box::new(PlainFileStore::open(path, block_count)?),
        ("inline", true, Some(path), None) if creates && !in_place => {
            Box::new(InlineFileStore::create(path, block_count)?)
        }
        ("inline", true, Some(path), None) if !in_place => {
            Box::new(InlineFileStore::open(path, block_count)?)
        }
        ("nvme", true, Some(path), None) if creates => {
            Box::new(NvmeStore::create(path, block_count)?)
        }
        ("nvme", true, Some(path), None) => Box::new(NvmeStore::open(path, block_count)?),
        _ => {
            let detail = format!("store {kind:?} isn't offered with these options: {options:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
    })
}

/// Opens the device of a store in place with all of its blocks. The store on it says how many it
/// needs.
fn open_whole(options: &StoreOptions<'_>) -> io::Result<Box<dyn BlockStore>> {
    Ok(match (options.kind, options.path) {
        ("inline", Some(path)) if !options.in_place => Box::new(InlineFileStore::open_whole(path)?),
        ("nvme", Some(path)) => Box::new(NvmeStore::open_whole(path)?),
        _ => return open_raw(options),
    })
}

/// Refuses a store of another size. One that `can_be_larger` may have grown without the caller's
/// knowledge.
pub fn check_size(store: &dyn BlockStore, block_count: u64, can_be_larger: bool) -> io::Result<()> {
    let found = store.block_count();
    if found == block_count || can_be_larger && found > block_count {
        return Ok(());
    }
    let detail = format!("the store has {} blocks, not {block_count}", store.block_count());
    Err(io::Error::new(io::ErrorKind::InvalidData, detail))
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;

    const MEMORY: StoreOptions<'_> = StoreOptions {
        kind: "memory",
        block_count: 10,
        is_sealed: true,
        path: None,
        creates: true,
        drive: None,
        in_place: false,
        is_fresh: true,
        trust: &Trust { secret: None, anchor: None, opening: None, reserves: false },
    };

    #[test]
    fn every_kind_is_made_and_opened_again() {
        let scratch = Scratch::new();
        let path = scratch.file();
        for (is_sealed, block_bytes) in [(true, 4160), (false, 4096)] {
            let memory = StoreOptions { is_sealed, ..MEMORY };
            assert_eq!(open(&memory).expect("memory").block_bytes(), block_bytes);
            let drive = StoreOptions { kind: "emulated", drive: Some("sn655"), ..memory };
            assert_eq!(open(&drive).expect("emulated").block_bytes(), block_bytes);
            let file = StoreOptions { kind: "file", path: Some(&path), ..memory };
            assert_eq!(open(&file).expect("file").block_bytes(), block_bytes);
            let again = StoreOptions { creates: false, ..file };
            assert_eq!(open(&again).expect("file").block_bytes(), block_bytes);
            std::fs::remove_file(&path).expect("file");
        }
        for is_fresh in [false, true] {
            let inline = StoreOptions { kind: "inline", path: Some(&path), is_fresh, ..MEMORY };
            assert_eq!(open(&inline).expect("inline").block_bytes(), 4160);
            let again = open(&StoreOptions { creates: false, ..inline }).expect("inline");
            assert_eq!(again.block_count(), 10);
            std::fs::remove_file(&path).expect("file");
        }
    }

    #[test]
    fn options_that_do_not_go_together_are_refused() {
        let path = Some(Path::new("/nonexistent"));
        for options in [
            StoreOptions { kind: "floppy", ..MEMORY },
            StoreOptions { path, ..MEMORY },
            StoreOptions { creates: false, ..MEMORY },
            StoreOptions { drive: Some("sn655"), ..MEMORY },
            StoreOptions { kind: "emulated", ..MEMORY },
            StoreOptions { kind: "file", ..MEMORY },
            StoreOptions { kind: "file", path, in_place: true, ..MEMORY },
            StoreOptions { kind: "nvme", path, is_sealed: false, ..MEMORY },
            StoreOptions { kind: "inline", path, is_sealed: false, ..MEMORY },
        ] {
            let error = open(&options).expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{options:?}");
        }
    }

    #[test]
    fn a_store_of_another_size_is_refused() {
        let scratch = Scratch::new();
        let path = scratch.file();
        let file = StoreOptions { kind: "file", path: Some(&path), ..MEMORY };
        open(&file).expect("file");
        let other = StoreOptions { creates: false, block_count: 11, ..file };
        let error = open(&other).expect_err("too small");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let larger = StoreOptions { creates: false, block_count: 9, ..file };
        assert_eq!(open(&larger).expect("one that grew").block_count(), 10);
        let bare = StoreOptions { is_fresh: false, ..larger };
        let error = open(&bare).expect_err("plain sectors never grow");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
