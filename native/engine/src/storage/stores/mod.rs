//! The stores themselves; `store` says what they have in common, `docs/stores.md` what each keeps
//! on its device and what it guarantees.

pub mod layout;
pub mod memory;
pub mod pages;
pub mod recovery;
pub mod sealed_map;
pub mod slots;
pub mod table;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod power_cut_tests;
#[cfg(test)]
mod torn_disk;
