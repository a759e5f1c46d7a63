//! libFuzzer entry of `sealane_fuzz::session_peer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::session_peer(data));
