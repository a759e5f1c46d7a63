//! The stores. `store` defines their common interface; `docs/formats/stores.md` says what each kind
//! writes to its device and guarantees.

mod changes;
pub mod device;
pub mod emulated;
pub mod fresh;
pub mod fresh_store;
mod immediate;
mod in_place_channel;
mod in_place_parts;
pub mod in_place_store;
mod in_place_upkeep;
pub mod inline_file;
pub mod label;
pub mod memory;
pub mod nvme;
pub mod nvme_command;
pub mod pages;
pub mod plain_file;
mod queued_pages;
mod raw_pages;
pub mod remote;
mod remote_link;
pub mod remote_sectors;
pub mod ring;
mod sealed_channel;
pub mod sealed_file;
mod sealed_upkeep;
pub mod selection;
pub mod slots;
mod write_window;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod extend_tests;
#[cfg(test)]
pub(super) mod scratch;
#[cfg(test)]
mod served;
#[cfg(test)]
mod torn_disk;
#[cfg(test)]
mod upkeep_tests;
