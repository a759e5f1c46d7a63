//! The stores themselves; `store` says what they have in common, `docs/stores.md` what each keeps
//! on its device and what it guarantees.

pub mod device;
pub mod emulated;
mod immediate;
pub mod inline_file;
pub mod journal;
pub mod label;
pub mod layout;
pub mod memory;
pub mod nvme;
pub mod nvme_command;
pub mod pages;
pub mod plain_file;
pub mod recovery;
pub mod remote;
mod remote_link;
pub mod remote_sectors;
pub mod ring;
pub mod sealed_file;
pub mod sealed_map;
pub mod selection;
pub mod slots;
pub mod table;

#[cfg(test)]
mod authenticity_tests;
#[cfg(test)]
mod conformance;
#[cfg(test)]
mod power_cut_tests;
#[cfg(test)]
mod scratch;
#[cfg(test)]
mod served;
#[cfg(test)]
mod torn_disk;
