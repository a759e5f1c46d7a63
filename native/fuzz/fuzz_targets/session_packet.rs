//! libFuzzer entry of `sealane_fuzz::session_packet`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::session_packet(data));
