//! The Hazel Merkle tree (arXiv:2510.18756 §3.3.2) and related types, which determine the current
//! version of each sector. `docs/decisions/0024-node-function.md` justifies the functions,
//! `0025-batched-tree.md` the way in which the tree is updated.
//!
//! A *leaf page* describes one *set* of sectors. Its *node* is a keyed hash of 16 bytes, on level 0
//! of the tree; inner nodes are kept in memory only. Entries that are newer than their leaf page
//! are *pending*. Nothing here does I/O, creates threads or draws randomness.

pub mod fast_path;
pub mod leaf;
pub mod milestone;
pub mod node;
pub mod openings;
pub mod pending;
pub mod tree;

#[cfg(test)]
mod tree_tests;
