//! Freshness that a store keeps by itself: changes pending in memory and in an authenticated log,
//! leaf pages under a tree, checkpoints, and an anchor outside the device (`docs/formats/stores.md`
//! §2, §3).

pub mod anchor;
pub mod announcements;
mod carried;
pub mod checkpoint;
mod codec;
mod commit;
pub mod counters;
pub mod failure;
pub mod geometry;
mod growth;
mod hashers;
pub mod in_place;
mod intents;
pub mod journal;
pub mod keys;
pub mod leaves;
pub mod log;
mod log_head;
mod lost;
pub mod map;
mod merge;
pub mod nodes;
pub mod opening;
pub mod passage;
pub mod placed;
pub mod queued_anchor;
mod recovery;
mod slot_maps;
mod structure;
pub mod superblock;
pub mod upkeep;

#[cfg(test)]
mod authenticity_tests;
#[cfg(test)]
mod cost_tests;
#[cfg(test)]
mod growth_tests;
#[cfg(test)]
mod in_place_tests;
#[cfg(test)]
mod leaves_tests;
#[cfg(test)]
mod power_cut_tests;
#[cfg(test)]
mod test_blocks;
#[cfg(test)]
mod worlds;
