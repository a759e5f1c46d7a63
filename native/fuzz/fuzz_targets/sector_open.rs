//! libFuzzer entry of `sealane_fuzz::sector_open`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::sector_open(data));
