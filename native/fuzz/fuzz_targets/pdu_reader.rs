//! libFuzzer entry of `sealane_fuzz::pdu_reader`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::pdu_reader(data));
