//! The stores themselves; `store` says what they have in common, `docs/stores.md` what each keeps
//! on its device and what it guarantees.

pub mod memory;

#[cfg(test)]
mod conformance;
