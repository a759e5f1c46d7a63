//! libFuzzer entry of `sealane_fuzz::store_recovery_in_place`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::store_recovery_in_place(data));
