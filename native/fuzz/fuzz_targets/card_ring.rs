//! libFuzzer entry of `sealane_fuzz::card_ring`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::card_ring(data));
