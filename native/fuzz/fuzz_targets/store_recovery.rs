//! libFuzzer entry of `sealane_fuzz::store_recovery`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::store_recovery(data));
