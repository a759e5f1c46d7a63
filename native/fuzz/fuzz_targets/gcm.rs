//! libFuzzer entry of `sealane_fuzz::gcm`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::gcm(data));
