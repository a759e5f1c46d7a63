//! libFuzzer entry of `sealane_fuzz::ring_entry`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::ring_entry(data));
