//! libFuzzer entry of `sealane_fuzz::controller_queue_secure`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::controller_queue_secure(data));
